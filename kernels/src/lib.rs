#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

/// One compiled `.cu` file: a fatbin to hand to `cuModuleLoadData`.
///
/// Modules whose name ends in `_sm90` hold machine code for compute capability 9.0 alone; the others hold PTX for
/// 8.0, which the driver compiles for any later chip, and machine code for the chip that the build named.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// The stem of the source file, unique among all modules.
    pub name: &'static str,
    /// The fatbin.
    pub image: &'static [u8],
}

impl Module {
    /// Whether the module's code runs on compute capability 9.0 only.
    #[must_use]
    pub fn is_sm90(&self) -> bool {
        self.name.ends_with("_sm90")
    }
}

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/modules.rs"));

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::MODULES;

    #[test]
    fn modules_are_fatbins_with_unique_sorted_names() {
        assert!(MODULES.windows(2).all(|w| w[0].name < w[1].name));
        for m in MODULES {
            // The fatbin container's magic number, little-endian 0xBA55ED50.
            assert_eq!(&m.image[..4], [0x50, 0xED, 0x55, 0xBA], "{}", m.name);
        }
    }
}
