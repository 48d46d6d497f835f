//! A hash for telling files and checkpoints apart: the same on every machine and in every version,
//! unlike the standard library's. It finds accidents, not forgeries.

/// Hashes a stream of bytes, however it is cut into pieces.
#[derive(Debug, Clone, Default)]
pub struct Fingerprint {
    state: u64,
    /// Bytes that do not make a word yet, the first lowest.
    word: u64,
    len: u64,
}

impl Fingerprint {
    /// Of nothing so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes to the stream.
    pub fn update(&mut self, bytes: &[u8]) {
        let open = (self.len % 8) as usize;
        let head = if open == 0 {
            0
        } else {
            bytes.len().min(8 - open)
        };
        bytes[..head].iter().for_each(|b| self.byte(*b));
        let (words, tail) = bytes[head..].as_chunks::<8>();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        self.len += 8 * words.len() as u64;
        tail.iter().for_each(|b| self.byte(*b));
    }

    /// Appends bytes behind their length, so that neighbours cannot trade bytes unnoticed.
    pub fn update_framed(&mut self, bytes: &[u8]) {
        self.update(&(bytes.len() as u64).to_le_bytes());
        self.update(bytes);
    }

    /// The hash of everything appended.
    pub fn finish(&self) -> u64 {
        let mut end = self.clone();
        end.mix(self.word);
        end.mix(self.len);
        // The last words have only reached the upper bits so far.
        let h = (end.state ^ (end.state >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        h ^ (h >> 32)
    }

    fn byte(&mut self, byte: u8) {
        self.word |= u64::from(byte) << (8 * (self.len % 8));
        self.len += 1;
        if self.len.is_multiple_of(8) {
            self.mix(self.word);
            self.word = 0;
        }
    }

    /// A bijection of the state for every word, and of the word for every state: two streams that
    /// differ in one word always end differently.
    fn mix(&mut self, word: u64) {
        self.state = (self.state.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pieces: &[&[u8]]) -> u64 {
        let mut h = Fingerprint::new();
        pieces.iter().for_each(|p| h.update(p));
        h.finish()
    }

    #[test]
    fn how_the_stream_is_cut_does_not_matter() {
        let bytes: Vec<u8> = (0..61).map(|i| i * 7 + 1).collect();
        let whole = of(&[&bytes]);
        for cut in 0..=bytes.len() {
            for second in [cut, (cut + 3).min(61), 61] {
                let pieces = [&bytes[..cut], &bytes[cut..second], &bytes[second..]];
                assert_eq!(of(&pieces), whole, "{cut} {second}");
            }
        }
        // Files are recognised by it across versions.
        assert_eq!(of(&[b"DeepSeek-V4.1"]), GOLDEN);
    }

    const GOLDEN: u64 = 2945869860598851223;

    #[test]
    fn every_bit_and_the_length_count() {
        let bytes = [0u8; 19];
        let whole = of(&[&bytes]);
        for bit in 0..8 * bytes.len() {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&[&other]), whole, "{bit}");
        }
        assert_ne!(of(&[&bytes[..18]]), whole);
        assert_ne!(of(&[]), of(&[&[0]]));
    }
}
