//! Threads that stay at hand through a pass of many small operations.
//!
//! A small pass is hundreds of operations of some 10 µs. Handing half of one to a thread that sleeps
//! costs more than that, on both sides: so the pass runs on a thread of the pool, where handing over is
//! a push to a queue, and a few others watch that queue instead of going to sleep.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Threads kept awake besides the pass's own. More would only get in each other's way: work for more of
/// them is large enough to be worth a wake-up.
const AWAKE: usize = 3;

/// Looks at empty queues after which a thread goes back to sleep, about 200 µs.
const PATIENCE: usize = 4096;

/// Runs `f` on a thread of the current pool, others of which stay awake until it returns.
///
/// For work that does not wait for other threads in ways of its own: such waiting would take a thread
/// from the pool. With a pool of one thread this is `f()`.
pub fn in_pool<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let threads = rayon::current_num_threads();
    if threads == 1 {
        return f();
    }
    rayon::scope(|_| {
        let done = Done(Arc::default());
        let home = rayon::current_thread_index();
        for _ in 0..AWAKE.min(threads - 1) {
            let done = done.0.clone();
            rayon::spawn(move || {
                // The pass's own thread may come across this while it waits for a part of its work.
                if rayon::current_thread_index() != home {
                    watch(&done);
                }
            });
        }
        f()
    })
}

/// Does what others hand out, until the pass is over or nothing has come for a while.
fn watch(done: &AtomicBool) {
    let mut idle = 0;
    while idle < PATIENCE && !done.load(Ordering::Relaxed) {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => idle = 0,
            _ => {
                idle += 1;
                std::hint::spin_loop();
            }
        }
    }
}

/// Tells the watching threads that the pass is over, also when it panics.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `a` and `b`, side by side where their `work` (see [`should_parallelise`](super::should_parallelise))
/// is worth it.
pub fn join<A: Send, B: Send>(
    work: usize,
    a: impl FnOnce() -> A + Send,
    b: impl FnOnce() -> B + Send,
) -> (A, B) {
    if super::should_parallelise(work) {
        rayon::join(a, b)
    } else {
        (a(), b())
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn passes_end_with_their_result_or_their_panic() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().expect("threads can be made");
            for n in 0..50usize {
                let sum = pool.install(|| in_pool(|| (0..n).into_par_iter().sum::<usize>()));
                assert_eq!(sum, n * n.saturating_sub(1) / 2);
                let pass = || pool.install(|| in_pool(|| assert!(n > 100, "as planned")));
                assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(pass)).is_err());
            }
        }
    }
}
