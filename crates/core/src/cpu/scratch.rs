//! Buffers that outlive a call, so that decoding one token does not allocate.

use std::cell::RefCell;

/// Larger buffers go back to the allocator: a long prompt should not leave its memory behind.
const KEEP: usize = 1 << 20;

thread_local! {
    static BUFFERS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `len` values of unspecified content from the thread's own buffers.
///
/// A buffer is taken out while `f` runs: a nested call, or another task that rayon runs on this
/// thread meanwhile, gets the next one.
pub fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = f(&mut buffer[..len]);
    if buffer.len() <= KEEP {
        BUFFERS.with_borrow_mut(|buffers| buffers.push(buffer));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_buffers_do_not_alias_and_are_kept() {
        for _ in 0..3 {
            with_scratch(4, |outer| {
                outer.fill(1.0);
                with_scratch(8, |inner| {
                    inner.fill(2.0);
                    assert_eq!(inner.len(), 8);
                });
                assert_eq!(outer, [1.0; 4]);
            });
        }
        assert_eq!(BUFFERS.with_borrow(Vec::len), 2);
    }

    #[test]
    fn large_buffers_are_given_back() {
        with_scratch(KEEP + 1, |large| assert_eq!(large.len(), KEEP + 1));
        BUFFERS.with_borrow(|buffers| assert!(buffers.iter().all(|b| b.len() <= KEEP)));
    }
}
