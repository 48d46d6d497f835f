//! E8M0: a power of two, `2^(b - 127)`, the scale of a block. `255` is NaN.
//!
//! Byte 0 is 2^-127, below the normal range of f32: it must stay a subnormal and not become zero.
//! A byte is an exponent and never a number: casting 130 to `130.0` instead of `8.0` is a classic.

/// The byte of NaN.
pub const NAN: u8 = 255;

/// The byte of 1.0.
pub const ONE: u8 = 127;

/// The value of a byte; exact. NaN for 255.
#[inline]
pub const fn decode(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        NAN => f32::NAN,
        b => f32::from_bits((b as u32) << 23),
    }
}

/// The nearest power of two, ties to the even byte, saturating: 0 below 2^-127 and 254 above 2^127.
///
/// NaN and negative values have no counterpart and become [`NAN`].
pub fn encode(x: f32) -> u8 {
    if x.is_nan() || x < 0.0 {
        return NAN;
    }
    let bits = x.to_bits();
    let exponent = bits >> 23;
    if exponent == 0 {
        // Subnormals: 1.5 * 2^-127 is the tie between bytes 0 and 1, and 0 is even.
        return u8::from(bits > 0x0060_0000);
    }
    // The tie 1.5 * 2^e lies at mantissa 0x400000.
    let up = match (bits & 0x7f_ffff).cmp(&0x40_0000) {
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Equal => exponent & 1,
        std::cmp::Ordering::Greater => 1,
    };
    (exponent + up).min(254) as u8
}

/// The byte of a value that is a power of two already, such as [`pow2ceil`] makes; 255 for NaN and
/// infinity.
#[inline(always)]
pub(crate) fn exponent_of(pow2: f32) -> u8 {
    (pow2.to_bits() >> 23) as u8
}

/// The smallest power of two that is at least `t`, decided on the bit pattern.
///
/// For positive normal `t`. Powers of two stay; a subnormal gives 2^-126, a `t` above 2^127 (infinity
/// too) infinity, NaN stays NaN.
///
/// Reference: `kernel.py`, the `ue8m0` scale rule.
#[inline(always)]
pub fn pow2ceil(t: f32) -> f32 {
    let bits = t.to_bits();
    let up = (bits & 0x7f_ffff != 0) as u32;
    if t.is_nan() {
        t
    } else {
        f32::from_bits(((bits >> 23 & 255) + up) << 23)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Traps A4 and C4: byte 0 is 2^-127 and not zero, 255 is NaN and not infinity.
    #[test]
    fn landmarks() {
        for (byte, value) in [
            (0u8, 2f64.powi(-127)),
            (1, 2f64.powi(-126)),
            (126, 0.5),
            (127, 1.0),
            (130, 8.0), // trap C8: an exponent, not the number 130
            (254, 2f64.powi(127)),
        ] {
            assert_eq!(f64::from(decode(byte)), value);
        }
        assert!(decode(255).is_nan());
    }

    #[test]
    fn every_byte_round_trips() {
        for byte in 0..=254 {
            assert_eq!(encode(decode(byte)), byte);
            if byte > 0 {
                assert_eq!(exponent_of(decode(byte)), byte);
            }
        }
        assert_eq!(encode(decode(255)), 255);
    }

    #[test]
    fn encode_rounds_to_nearest_and_ties_to_even() {
        for byte in 0..254u8 {
            let tie = 1.5 * decode(byte);
            assert_eq!(encode(tie), byte + byte % 2, "byte {byte}");
            assert_eq!(encode(tie.next_down()), byte);
            assert_eq!(encode(tie.next_up()), byte + 1);
        }
        assert_eq!(encode(0.0), 0);
        assert_eq!(encode(f32::MAX), 254);
        assert_eq!(encode(f32::INFINITY), 254);
        assert_eq!((encode(-1.0), encode(f32::NAN)), (255, 255));
    }

    #[test]
    fn pow2ceil_keeps_powers_and_lifts_the_rest() {
        for e in -126..=127 {
            let p = 2f32.powi(e);
            assert_eq!(pow2ceil(p), p);
            assert_eq!(
                pow2ceil(p.next_up()),
                if e == 127 { f32::INFINITY } else { 2.0 * p }
            );
        }
        assert_eq!(pow2ceil(0.75), 1.0);
        assert_eq!(pow2ceil(f32::INFINITY), f32::INFINITY);
        assert!(pow2ceil(f32::NAN).is_nan());
    }
}
