use half::bf16;

/// Distance in bf16 steps; equal values (also `0` and `-0`) are 0 apart, NaN is far from anything
/// but NaN.
pub fn bf16_ulp_distance(a: bf16, b: bf16) -> u32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() && b.is_nan() {
            0
        } else {
            u32::MAX
        };
    }
    // Maps the sign-magnitude bits to a line on which neighbours differ by one.
    let line = |v: bf16| {
        let bits = i32::from(v.to_bits());
        if bits & 0x8000 != 0 {
            -(bits & 0x7fff)
        } else {
            bits
        }
    };
    line(a).abs_diff(line(b))
}

/// `rms(a - b) / rms(b)`, with `b` the expected values.
pub fn rel_rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sq = |v: f64| v * v;
    let diff: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| sq(f64::from(*a) - f64::from(*b)))
        .sum();
    let norm: f64 = b.iter().map(|b| sq(f64::from(*b))).sum();
    if diff == 0.0 {
        0.0
    } else {
        (diff / norm).sqrt()
    }
}

/// Every `|a - b| <= atol + rtol * |b|`, with `b` the expected values; NaN only where both are.
#[track_caller]
pub fn assert_close(a: &[f32], b: &[f32], atol: f32, rtol: f32) {
    assert_eq!(a.len(), b.len(), "lengths differ");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let ok = (a.is_nan() && b.is_nan()) || a == b || (a - b).abs() <= atol + rtol * b.abs();
        assert!(ok, "element {i}: {a} vs expected {b}");
    }
}

/// Every element equal bit for bit.
#[track_caller]
pub fn assert_bits_eq(a: &[bf16], b: &[bf16]) {
    assert_eq!(a.len(), b.len(), "lengths differ");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "element {i}: {a} vs expected {b}");
    }
}

/// What became of input that may be refused: `want` is part of the error's message, or empty where the input
/// is to be taken.
///
/// # Panics
/// It went the other way.
#[track_caller]
pub fn assert_outcome<T: std::fmt::Debug, E: std::fmt::Display>(
    case: &str,
    result: Result<T, E>,
    want: &str,
) {
    match result {
        Ok(value) => assert!(want.is_empty(), "{case}: {value:?}"),
        Err(err) => {
            let err = err.to_string();
            assert!(!want.is_empty() && err.contains(want), "{case}: {err}");
        }
    }
}
