use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// A seed from a test's name, so that a failure repeats alone and order does not matter.
pub fn seed_of(name: &str) -> u64 {
    // FNV-1a.
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    })
}

/// `n` values, roughly normal with the given standard deviation.
pub fn random_f32(n: usize, std: f32, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n)
        .map(|_| {
            // Sum of four uniforms: close enough to normal, bounded, and has no special cases.
            let s: f32 = (0..4).map(|_| rng.random::<f32>() - 0.5).sum();
            s * std * 1.732_050_8
        })
        .collect()
}

/// [`random_f32`] rounded to bf16.
pub fn random_bf16(n: usize, std: f32, seed: u64) -> Vec<bf16> {
    random_f32(n, std, seed)
        .into_iter()
        .map(bf16::from_f32)
        .collect()
}

/// Runs `f` inside a rayon pool of `n` threads.
pub fn with_threads<R: Send>(n: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new()
        .num_threads(n)
        .build()
        .expect("a small thread pool")
        .install(f)
}
