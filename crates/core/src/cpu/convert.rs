//! bf16 to f32 and back, without branches, so that loops over them vectorise.

use half::bf16;

/// The value of a bf16; exact.
#[inline(always)]
pub fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// [`widen`] over a slice; the shorter of the two decides the length.
pub fn widen_slice(xs: &[bf16], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(xs) {
        *o = widen(*x);
    }
}

/// The nearest bf16, ties to even. Every NaN becomes the same one, so that results do not depend on
/// which NaN an instruction set passes on.
#[inline(always)]
pub fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded as u16 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_round_trips() {
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            let back = round_bf16(widen(x));
            assert!(back.to_bits() == bits || x.is_nan() && back.to_bits() == 0x7fc0);
        }
    }

    #[test]
    fn rounds_like_half() {
        for i in 0..1 << 20 {
            let x = f32::from_bits((i * 4093) ^ 0x5a5a);
            if !x.is_nan() {
                assert_eq!(round_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{x}");
            }
        }
        assert!(round_bf16(f32::MAX).is_infinite());
    }
}
