//! How many drafted tokens are worth verifying.

/// How many of the proposed tokens are verified.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum DraftLength {
    /// All of them.
    #[default]
    Full,
    /// At most this many.
    AtMost(usize),
    /// Those before the first whose probability of being accepted, given that all before it were, is
    /// below the threshold.
    Confidence(f32),
    /// As many as pay at the measured speed of passes with that many tokens; see [`schedule`].
    Measured {
        /// Passes a second with 0, 1, 2, … tokens.
        sps_by_batch: Vec<f64>,
    },
}

impl DraftLength {
    /// How many of the drafts with these confidence logits to verify, for a sequence on its own.
    pub fn choose(&self, confidence: &[f32]) -> usize {
        match self {
            Self::Full => confidence.len(),
            Self::AtMost(n) => confidence.len().min(*n),
            Self::Confidence(threshold) => {
                let low = confidence
                    .iter()
                    .position(|c| sigmoid(*c) < f64::from(*threshold));
                low.unwrap_or(confidence.len())
            }
            Self::Measured { sps_by_batch } => {
                let probabilities = confidence.iter().map(|c| sigmoid(*c)).collect();
                schedule(&[probabilities], sps_by_batch)[0]
            }
        }
    }
}

pub(crate) fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

/// Draft lengths for a batch that make the most of the hardware.
///
/// `confidence[r][j]` is the probability that draft `j` of request `r` is accepted if all before it
/// were, so a draft survives with the product up to it. Drafts are admitted in the order of that
/// survival (the earlier request and position first among equals). With `R` requests a pass of
/// `R + n` tokens commits `R` plus the admitted survivals; times `sps_by_batch[tokens]` that is the
/// rate of committed tokens. Admission stops at the first draft that lowers the rate: stopping there
/// and not searching on keeps a draft's admission independent of the draft itself, which is what
/// keeps sampling lossless. A table that ends earlier also ends admission.
///
/// Reference: Algorithm 1 of the DSpark paper.
pub fn schedule(confidence: &[Vec<f64>], sps_by_batch: &[f64]) -> Vec<usize> {
    let mut pool: Vec<(f64, usize, usize)> = Vec::new();
    for (r, row) in confidence.iter().enumerate() {
        let mut survival = 1.0;
        for (j, c) in row.iter().enumerate() {
            survival *= c;
            pool.push((survival, r, j));
        }
    }
    pool.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut lengths = vec![0; confidence.len()];
    let (mut batch, mut committed) = (confidence.len(), confidence.len() as f64);
    let rate = |tokens: usize, committed: f64| sps_by_batch.get(tokens).map(|sps| committed * sps);
    let Some(mut best) = rate(batch, committed) else {
        return lengths;
    };
    for (survival, r, j) in pool {
        batch += 1;
        committed += survival;
        match rate(batch, committed) {
            Some(rate) if rate > best => best = rate,
            _ => break,
        }
        lengths[r] = j + 1;
    }
    lengths
}
