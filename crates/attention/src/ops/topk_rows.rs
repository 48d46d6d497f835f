//! The k best of a stream of scored indices, in memory bounded by k.

/// Keeps the `k` best of the scores pushed so far: the higher score first, the lower index among
/// equals. NaN counts as minus infinity and `-0.0` as `0.0`.
///
/// The kept set is a function of what was pushed, not of the order or of how pushes were spread over
/// several selections that were merged later. Holds at most `2k + 64` entries.
#[derive(Debug, Clone)]
pub(crate) struct TopRows {
    k: usize,
    // Score in the high half, complement of the index in the low one: keys are distinct, and the
    // greater key is the better entry.
    keys: Vec<u64>,
    // Keys up to this one are known to be beaten by k others.
    floor: u64,
}

impl TopRows {
    pub(crate) fn new(k: usize) -> Self {
        Self {
            k,
            keys: Vec::new(),
            floor: 0,
        }
    }

    #[inline]
    pub(crate) fn push(&mut self, score: f32, index: u32) {
        self.push_key(key(score, index));
    }

    /// Adds everything another selection kept.
    pub(crate) fn merge(&mut self, other: &Self) {
        for &key in &other.keys {
            self.push_key(key);
        }
    }

    #[inline]
    fn push_key(&mut self, key: u64) {
        if key > self.floor {
            self.keys.push(key);
            if self.keys.len() >= 2 * self.k + 64 {
                self.shrink();
            }
        }
    }

    #[cold]
    fn shrink(&mut self) {
        if self.k == 0 {
            self.keys.clear();
        } else if self.keys.len() > self.k {
            let (_, &mut last, _) = self
                .keys
                .select_nth_unstable_by(self.k - 1, |a, b| b.cmp(a));
            self.keys.truncate(self.k);
            self.floor = last;
        }
    }

    /// The kept indices in ascending order; empties the selection for the next use.
    pub(crate) fn drain_ascending(&mut self) -> Vec<u32> {
        self.shrink();
        self.floor = 0;
        let mut indices: Vec<u32> = self.keys.drain(..).map(|key| !(key as u32)).collect();
        indices.sort_unstable();
        indices
    }

    #[cfg(test)]
    pub(crate) fn sorted_keys(&self) -> Vec<u64> {
        let mut keys = self.keys.clone();
        keys.sort_unstable();
        keys
    }
}

/// Order-preserving 64-bit key: larger is better.
#[inline]
fn key(score: f32, index: u32) -> u64 {
    let score = if score.is_nan() {
        f32::NEG_INFINITY
    } else {
        score + 0.0
    };
    let bits = score.to_bits();
    // Negative floats compare in reverse as integers: flip them all, and set the sign of the others.
    let ordered = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    u64::from(ordered) << 32 | u64::from(!index)
}

/// The definition of a streaming selection: sorts all of `scores` and returns the `k` best indices in
/// ascending order, the higher score first and the lower index among equals, NaN as minus infinity.
pub fn topk_rows_ref(scores: &[f32], k: usize) -> Vec<u32> {
    let value = |i: u32| match scores[i as usize] {
        s if s.is_nan() => f32::NEG_INFINITY,
        s => s,
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| {
        value(b)
            .partial_cmp(&value(a))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    order.truncate(k);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn score() -> impl Strategy<Value = f32> {
        prop_oneof![
            6 => (-3i32..4).prop_map(|v| v as f32 / 2.0),
            1 => Just(-0.0),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NEG_INFINITY),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn streaming_equals_sorting(scores in prop::collection::vec(score(), 0..400), k in 0usize..40, cut in 0usize..400) {
            let want = topk_rows_ref(&scores, k);
            let (mut a, mut b) = (TopRows::new(k), TopRows::new(k));
            for (i, &s) in scores.iter().enumerate() {
                if i < cut { &mut a } else { &mut b }.push(s, i as u32);
            }
            b.merge(&a);
            prop_assert_eq!(b.drain_ascending(), want.clone());
            // A drained selection starts afresh.
            for (i, &s) in scores.iter().enumerate().rev() {
                b.push(s, i as u32);
            }
            prop_assert_eq!(b.drain_ascending(), want);
        }
    }
}
