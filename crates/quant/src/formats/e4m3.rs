//! E4M3 without infinities ("fn"): sign, 4 exponent bits of bias 7, 3 mantissa bits.
//!
//! ```text
//! value = (-1)^s * 2^(e-7) * (1 + m/8)      e > 0
//! value = (-1)^s * 2^-6 * (m/8)             e = 0: steps of 2^-9
//! ```
//! The largest finite value is 448 (`0x7e`); `0x7f` and `0xff` are NaN.

/// Largest finite value.
pub const MAX: f32 = 448.0;

/// Smallest positive value, the step of the subnormals: 2^-9.
pub const MIN_POSITIVE: f32 = 1.0 / 512.0;

/// The code of NaN with a positive sign.
pub const NAN: u8 = 0x7f;

static VALUES: [f32; 256] = table();

const fn table() -> [f32; 256] {
    let mut values = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u8);
        code += 1;
    }
    values
}

const fn value(code: u8) -> f32 {
    let sign = ((code & 0x80) as u32) << 24;
    let (e, m) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    if code & 0x7f == NAN {
        return f32::from_bits(f32::NAN.to_bits() | sign);
    }
    if e == 0 {
        let magnitude = m as f32 * MIN_POSITIVE;
        return f32::from_bits(magnitude.to_bits() | sign);
    }
    f32::from_bits((e + 120) << 23 | m << 20 | sign)
}

/// The value of a code; exact. NaN for `0x7f` and `0xff`.
pub const fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// The nearest code: ties to the even code, magnitudes above 448 (infinity too) become 448, the sign
/// of zero is kept, and NaN stays NaN.
#[inline]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return NAN | (x.to_bits() >> 24) as u8 & 0x80;
    }
    encode_finite(x.clamp(-MAX, MAX))
}

/// [`encode`] for `|x| <= 448`. Integer operations and no branch, so that loops over it vectorise.
#[inline(always)]
pub(crate) fn encode_finite(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Keep 3 mantissa bits: half of the dropped range, less one unless the kept bit is odd, carries
    // into the kept bits exactly where rounding to nearest even goes up.
    let normal = (magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20;
    let normal = normal.wrapping_sub(120 << 3);
    // 2^14 has an f32 step of 2^-9, the subnormal step: the addition rounds, ties to even.
    let subnormal = (f32::from_bits(magnitude) + 16384.0).to_bits() & 0xf;
    let code = if magnitude < 0x3c80_0000 {
        subnormal
    } else {
        normal
    };
    (code | bits >> 24 & 0x80) as u8
}

/// The value of the nearest code for `|x| <= 448`, without the way through the code.
#[inline(always)]
pub(crate) fn round_finite(x: f32) -> f32 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = (magnitude + 0x7_ffff + (magnitude >> 20 & 1)) & 0xfff0_0000;
    let subnormal = ((f32::from_bits(magnitude) + 16384.0) - 16384.0).to_bits();
    let value = if magnitude < 0x3c80_0000 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(value | bits & 0x8000_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_is_decode_of_encode() {
        for i in 0..=0x43e0_0000u32 / 997 {
            let x = f32::from_bits(i * 997);
            for x in [x, -x] {
                assert_eq!(
                    round_finite(x).to_bits(),
                    decode(encode(x)).to_bits(),
                    "{x}"
                );
            }
        }
    }

    #[test]
    fn every_code_round_trips() {
        for code in 0..=255u8 {
            assert_eq!(encode(decode(code)), code, "{code:#x}");
            assert_eq!(decode(code).is_nan(), code & 0x7f == NAN);
        }
    }

    /// Trap A3: subnormals are steps of 2^-9, not of 2^-6.
    #[test]
    fn landmarks() {
        for (code, value) in [
            (0x01, 2f32.powi(-9)),
            (0x07, 7.0 * 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(decode(code), value);
        }
        assert_eq!(decode(0x80).to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn ties_go_to_the_even_code_and_neighbours_do_not() {
        for code in 0..0x7eu8 {
            let (low, high) = (decode(code), decode(code + 1));
            let tie = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (sign, bit) in [(1.0, 0), (-1.0, 0x80)] {
                assert_eq!(encode(sign * tie), even | bit, "between {low} and {high}");
                assert_eq!(encode(sign * tie.next_down()), code | bit);
                assert_eq!(encode(sign * tie.next_up()), (code + 1) | bit);
            }
        }
    }

    #[test]
    fn saturates_and_keeps_signs() {
        for x in [448.0, 463.9, 464.0, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (0x7e, 0xfe));
        }
        assert_eq!((encode(0.0), encode(-0.0)), (0, 0x80));
        assert_eq!((encode(1e-45), encode(-1e-45)), (0, 0x80));
        assert_eq!((encode(f32::NAN), encode(-f32::NAN)), (0x7f, 0xff));
    }
}
