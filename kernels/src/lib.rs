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

/// Kernels that may begin while the one ahead of them still runs: each calls `after_previous` (`common/util.cuh`)
/// before it reads what another kernel wrote, and before it writes anything.
///
/// A kernel that does not must not be in this list; launched one after the other it is always right.
pub const OVERLAPPING: &[&str] = &[
    "act_quant",
    "argmax",
    "bf16_linear_f32_m16_t1",
    "bf16_linear_f32_m16_t2",
    "bf16_linear_f32_m8_t1",
    "bf16_linear_f32_m8_t2",
    "bf16_linear_m16_t1",
    "bf16_linear_m16_t2",
    "bf16_linear_m8_t1",
    "bf16_linear_m8_t2",
    "compress",
    "embedding",
    "experts_down_fp4",
    "experts_one",
    "experts_up_fp4",
    "fp8_few_m1",
    "fp8_few_m16",
    "fp8_few_m8",
    "fp8_few_plain_m1",
    "fp8_few_plain_m16",
    "fp8_few_plain_m8",
    "fp8_few_raw_m1",
    "fp8_few_swiglu_m1",
    "fp8_linear_m16_t1",
    "fp8_linear_m16_t2",
    "fp8_linear_m8_t1",
    "fp8_linear_m8_t2",
    "gate_one",
    "group_tokens",
    "hc_finish",
    "hc_post",
    "hc_pre",
    "hc_step",
    "hc_step_few",
    "moe_combine",
    "norm_rope_quant",
    "pack_rows",
    "query_heads_m1",
    "rms_norm",
    "scale_bf16",
    "sparse_attn",
    "sparse_attn_combine",
    "sparse_attn_few_16",
    "sparse_attn_few_8",
    "sparse_attn_few_packed_16",
    "sparse_attn_few_packed_8",
    "sparse_attn_packed",
    "sparse_attn_packed_sm90",
    "sparse_attn_sm90",
    "swiglu",
    "topk_gate",
    "write_rows",
];

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
