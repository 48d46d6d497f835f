//! E2M1: sign, 2 exponent bits, 1 mantissa bit. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
//!
//! Two codes share a byte: the even column in the low nibble, the odd one in the high nibble, along
//! the row and never split over half blocks.

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Values by code; bit 3 is the sign.
pub const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The value of the low nibble of `code`; exact. There are no infinities and no NaN.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code & 15)]
}

/// The nearest code: ties to the even code, magnitudes above 6 become 6, the sign of zero is kept.
///
/// The format has no NaN; NaN becomes the largest magnitude, and callers mark its block by a NaN scale.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let magnitude = if x.is_nan() { MAX } else { x.abs() };
    // A tie belongs to the even code: it goes up exactly at the cut points below an even code.
    let code = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    code | (x.to_bits() >> 28) as u8 & 8
}

/// The value [`encode`] rounds to, without the way through a table, so that loops vectorise.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    let magnitude = x.abs();
    // Each cut point passed adds the distance to the next magnitude.
    let step = |passed: bool, by: f32| if passed { by } else { 0.0 };
    let value = step(magnitude > 0.25, 0.5)
        + step(magnitude >= 0.75, 0.5)
        + step(magnitude > 1.25, 0.5)
        + step(magnitude >= 1.75, 0.5)
        + step(magnitude > 2.5, 1.0)
        + step(magnitude >= 3.5, 1.0)
        + step(magnitude > 5.0, 2.0);
    f32::from_bits(value.to_bits() | x.to_bits() & 0x8000_0000)
}

/// The byte of two neighbouring columns.
#[inline(always)]
pub fn pack(even: u8, odd: u8) -> u8 {
    even & 15 | odd << 4
}

/// The codes of two neighbouring columns: (even, odd).
#[inline(always)]
pub fn unpack(byte: u8) -> (u8, u8) {
    (byte & 15, byte >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips_with_its_sign() {
        for code in 0..16u8 {
            assert_eq!(encode(decode(code)), code);
            assert_eq!(decode(code).is_sign_negative(), code >= 8);
        }
    }

    /// Trap C1: cut points belong to the even code, half of them above and half below.
    #[test]
    fn ties_go_to_the_even_code() {
        let ties = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let values = [0.0f32, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0];
        for (i, (tie, value)) in ties.into_iter().zip(values).enumerate() {
            for sign in [1.0, -1.0] {
                assert_eq!(decode(encode(sign * tie)), sign * value);
                assert_eq!(encode(sign * tie.next_down()) & 7, i as u8);
                assert_eq!(encode(sign * tie.next_up()) & 7, i as u8 + 1);
            }
        }
    }

    #[test]
    fn saturates() {
        for x in [6.0, 6.1, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (7, 15));
        }
        assert_eq!(encode(f32::NAN) & 7, 7);
        assert_eq!((encode(0.0), encode(-0.0)), (0, 8));
    }

    #[test]
    fn round_is_decode_of_encode() {
        for i in -700..=700 {
            for x in [
                i as f32 / 100.0,
                (i as f32 / 64.0).next_up(),
                i as f32 / 8.0,
            ] {
                assert_eq!(round(x).to_bits(), decode(encode(x)).to_bits(), "{x}");
            }
        }
        assert_eq!(round(-0.0).to_bits(), (-0f32).to_bits());
    }

    /// Trap C2: the checkpoint's order is linear, even column in the low nibble.
    #[test]
    fn packed_order() {
        let codes: Vec<u8> = [0x10u8, 0x32]
            .iter()
            .flat_map(|b| <[u8; 2]>::from(unpack(*b)))
            .collect();
        assert_eq!(codes, [0, 1, 2, 3]);
        for byte in 0..=255 {
            let (even, odd) = unpack(byte);
            assert_eq!(pack(even, odd), byte);
        }
    }
}
