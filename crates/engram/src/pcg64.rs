//! numpy's `default_rng`: SeedSequence, PCG64 (XSL-RR 128/64) and `Generator.integers`, bit for bit.
//!
//! The hash multipliers of a checkpoint were drawn with numpy, so they can only be rebuilt with the
//! same generator. It is small, seedable and never changes, which also makes it a good source for
//! anything else whose output must be reproducible across versions.

const POOL: usize = 4;
const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

/// The running constant of one of SeedSequence's two hash passes.
struct HashConst {
    value: u32,
    step: u32,
}

impl HashConst {
    fn mix(&mut self, word: u32) -> u32 {
        let mut v = word ^ self.value;
        self.value = self.value.wrapping_mul(self.step);
        v = v.wrapping_mul(self.value);
        v ^ (v >> 16)
    }
}

fn combine(x: u32, y: u32) -> u32 {
    let r = x
        .wrapping_mul(0xca01_f9dd)
        .wrapping_sub(y.wrapping_mul(0x4973_f715));
    r ^ (r >> 16)
}

/// numpy's entropy pool: spreads seed words over 128 bits of state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeedSequence {
    pool: [u32; POOL],
}

impl SeedSequence {
    /// `words`: the seed split into u32 words, least significant first.
    pub fn new(words: &[u32]) -> Self {
        let mut hash = HashConst {
            value: 0x43b0_d7e5,
            step: 0x931e_8875,
        };
        let mut pool = [0; POOL];
        for (i, slot) in pool.iter_mut().enumerate() {
            *slot = hash.mix(words.get(i).copied().unwrap_or(0));
        }
        for s in 0..POOL {
            for d in 0..POOL {
                if s != d {
                    pool[d] = combine(pool[d], hash.mix(pool[s]));
                }
            }
        }
        for &word in words.iter().skip(POOL) {
            for slot in &mut pool {
                *slot = combine(*slot, hash.mix(word));
            }
        }
        Self { pool }
    }

    /// The pool after mixing.
    pub fn pool(&self) -> [u32; POOL] {
        self.pool
    }

    /// Four 64-bit words of generator state (`generate_state(4, uint64)`).
    pub fn state(&self) -> [u64; 4] {
        let mut hash = HashConst {
            value: 0x8b51_f9dd,
            step: 0x58f3_8ded,
        };
        let mut words = [0u32; 8];
        for (i, word) in words.iter_mut().enumerate() {
            *word = hash.mix(self.pool[i % POOL]);
        }
        let mut out = [0; 4];
        for (j, slot) in out.iter_mut().enumerate() {
            *slot = u64::from(words[2 * j]) | u64::from(words[2 * j + 1]) << 32;
        }
        out
    }
}

/// `numpy.random.default_rng(seed)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pcg64 {
    state: u128,
    inc: u128,
    /// High half of the last word split by [`Pcg64::next_u32`].
    spare: Option<u32>,
}

impl Pcg64 {
    /// The generator numpy makes from this integer seed.
    pub fn from_seed(seed: u64) -> Self {
        // numpy drops high zero words (and keeps one word for 0); padding makes that invisible here.
        let words = [seed as u32, (seed >> 32) as u32];
        let s = SeedSequence::new(&words).state().map(u128::from);
        let mut rng = Self {
            state: 0,
            inc: ((s[2] << 64 | s[3]) << 1) | 1,
            spare: None,
        };
        rng.step();
        rng.state = rng.state.wrapping_add(s[0] << 64 | s[1]);
        rng.step();
        rng
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.inc);
    }

    /// State and increment, for whoever continues it elsewhere.
    pub fn parts(&self) -> (u128, u128) {
        (self.state, self.inc)
    }

    /// Passes over `n` words, in about `log n` steps.
    pub fn advance(&mut self, mut n: u64) {
        let (mut mul, mut add) = (MULTIPLIER, self.inc);
        let (mut all_mul, mut all_add) = (1u128, 0u128);
        while n > 0 {
            if n & 1 == 1 {
                all_mul = all_mul.wrapping_mul(mul);
                all_add = all_add.wrapping_mul(mul).wrapping_add(add);
            }
            add = mul.wrapping_add(1).wrapping_mul(add);
            mul = mul.wrapping_mul(mul);
            n >>= 1;
        }
        self.state = self.state.wrapping_mul(all_mul).wrapping_add(all_add);
    }

    /// The next 64-bit word.
    pub fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// The next 32-bit word: a 64-bit word gives its low half first.
    pub fn next_u32(&mut self) -> u32 {
        if let Some(high) = self.spare.take() {
            return high;
        }
        let word = self.next_u64();
        self.spare = Some((word >> 32) as u32);
        word as u32
    }

    /// Uniform in `[0, 1)` with 53 bits, as `Generator.random`.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// One draw of `Generator.integers(0, max, endpoint=True)`: uniform in `0..=max`.
    ///
    /// numpy picks one of three methods by the size of the range, and each consumes the stream
    /// differently: nothing for `max == 0`, raw words where the range is a whole word, and Lemire's
    /// multiply-and-reject on 32 or 64 bits otherwise.
    pub fn integer_up_to(&mut self, max: u64) -> u64 {
        const MAX32: u64 = u32::MAX as u64;
        match max {
            0 => 0,
            MAX32 => u64::from(self.next_u32()),
            u64::MAX => self.next_u64(),
            _ if max < MAX32 => u64::from(self.lemire32(max as u32)),
            _ => self.lemire64(max),
        }
    }

    fn lemire32(&mut self, max: u32) -> u32 {
        let span = max + 1; // max < u32::MAX
        let mut product = u64::from(self.next_u32()) * u64::from(span);
        if (product as u32) < span {
            let threshold = (u32::MAX - max) % span;
            while (product as u32) < threshold {
                product = u64::from(self.next_u32()) * u64::from(span);
            }
        }
        (product >> 32) as u32
    }

    fn lemire64(&mut self, max: u64) -> u64 {
        let span = max + 1; // max < u64::MAX
        let mut product = u128::from(self.next_u64()) * u128::from(span);
        if (product as u64) < span {
            let threshold = (u64::MAX - max) % span;
            while (product as u64) < threshold {
                product = u128::from(self.next_u64()) * u128::from(span);
            }
        }
        (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_10007_has_numpys_pool_and_state() {
        let seq = SeedSequence::new(&[10007]);
        assert_eq!(
            seq.pool(),
            [0xf1a1_018d, 0xa7c6_0c02, 0xfd15_d50a, 0x03b8_1232]
        );
        assert_eq!(
            seq.state(),
            [
                0x77d3_2a34_8ad7_0d07,
                0x993e_d609_b84a_4fa5,
                0xd5f9_72de_c869_8e49,
                0x7d79_ebae_bcf1_48de
            ]
        );
    }

    #[test]
    fn first_words_of_the_released_layers() {
        let mut rng = Pcg64::from_seed(10007);
        let words = [
            0xd2c3_f840_2666_1e33,
            0x0d4f_b696_9eb5_7435,
            0x62e6_e1c5_8c3b_d72b,
            0xcb7d_d1a9_4ca9_6343,
        ];
        assert_eq!([(); 4].map(|()| rng.next_u64()), words);
        let mut rng = Pcg64::from_seed(140_098);
        let words = [
            0xba3e_cc29_cf07_c111,
            0x8dac_4bbe_1061_0b7c,
            0x550b_7148_777f_f213,
            0xe33b_7455_bc98_449e,
        ];
        assert_eq!([(); 4].map(|()| rng.next_u64()), words);
    }

    #[test]
    fn a_zero_range_consumes_nothing() {
        let (mut a, mut b) = (Pcg64::from_seed(3), Pcg64::from_seed(3));
        assert_eq!(a.integer_up_to(0), 0);
        assert_eq!(a.next_u64(), b.next_u64());
    }

    #[test]
    fn words_can_be_passed_over() {
        for n in [0, 1, 2, 3, 64, 1000, 129_280] {
            let mut one = Pcg64::from_seed(11);
            let mut other = one.clone();
            for _ in 0..n {
                one.next_u64();
            }
            other.advance(n);
            assert_eq!(one.parts(), other.parts(), "{n}");
            assert_eq!(one.next_u64(), other.next_u64(), "{n}");
        }
    }

    #[test]
    fn words_beyond_the_pool_change_the_state() {
        let short = SeedSequence::new(&[1, 2, 3, 4]);
        assert_ne!(short, SeedSequence::new(&[1, 2, 3, 4, 5]));
        // Within the pool, missing words are zeros.
        assert_eq!(SeedSequence::new(&[7]), SeedSequence::new(&[7, 0, 0, 0]));
    }
}
