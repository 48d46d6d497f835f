//! Buffers that outlive a call, so that decoding one token does not allocate.

use std::cell::Cell;

/// Larger buffers go back to the allocator: a long prompt should not leave its memory behind.
const KEEP: usize = 1 << 20;

thread_local! {
    static BUFFER: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with `len` values of unspecified content from the thread's own buffer.
///
/// The buffer is taken out while `f` runs: a nested call, or another task that rayon runs on this
/// thread meanwhile, gets one of its own.
pub fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = BUFFER.take();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = f(&mut buffer[..len]);
    // Of two nested buffers the larger is worth keeping.
    let other = BUFFER.take();
    let keep = if other.len() > buffer.len() {
        other
    } else {
        buffer
    };
    if keep.len() <= KEEP {
        BUFFER.set(keep);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_buffers_do_not_alias() {
        with_scratch(4, |outer| {
            outer.fill(1.0);
            with_scratch(8, |inner| {
                inner.fill(2.0);
                assert_eq!(inner.len(), 8);
            });
            assert_eq!(outer, [1.0; 4]);
        });
        assert!(BUFFER.take().len() >= 8);
    }
}
