//! Threads that stay at hand through a pass of many small operations.
//!
//! A small pass is hundreds of operations of some 10 µs. Handing half of one to a thread that sleeps
//! costs more than that, on both sides, and even a queue to steal from costs a good part of it. So the
//! pass runs on a thread of the pool while a few others watch a single slot, its [`Team`]'s: an operation
//! is put there as a number of tasks, everyone takes the next task until none is left, and the pass goes
//! on when the last is done. Operations too large for that go to the whole pool, in which the watching
//! threads take part.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use rayon::prelude::*;

/// Threads kept awake besides the pass's own. More would only get in each other's way: work for more of
/// them is large enough to be worth a wake-up.
const AWAKE: usize = 3;

/// Looks at an empty slot after which a thread goes back to sleep: some 400 µs, as long as laying out a step
/// of a hundred tokens takes.
const PATIENCE: usize = 16384;

/// Looks at the slot between looks at the pool's queues.
const LOOKS: usize = 16;

/// Below this many floating-point operations waking other threads costs more than it saves.
const POOL_WORK: usize = 400_000;
/// The same where threads are awake.
const TEAM_WORK: usize = 50_000;
/// From here on an operation is worth all threads of the pool.
const LARGE_WORK: usize = 20_000_000;

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Outside) };
}

/// Where a thread's code stands.
#[derive(Clone, Copy)]
enum Place {
    /// In no pass, or in one on a single thread.
    Outside,
    /// In a pass with this team; the pointer is good until the place is left.
    Pass(*const Team),
    /// In a task of a team: operations inside of it are not split again.
    Task,
}

/// Puts the thread's former place back, also when a panic passes.
struct Back(Place);

impl Back {
    fn from(place: Place) -> Self {
        Self(PLACE.replace(place))
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        PLACE.set(self.0);
    }
}

/// Whether `work` (about the number of floating-point operations) is worth spreading over threads.
///
/// Never changes a result, only where it is computed.
pub fn should_parallelise(work: usize) -> bool {
    let least = match PLACE.get() {
        Place::Outside => POOL_WORK,
        Place::Pass(_) => TEAM_WORK,
        Place::Task => return false,
    };
    work >= least && rayon::current_num_threads() > 1
}

/// Runs `f` on a thread of the current pool, others of which stay awake until it returns.
///
/// For work that does not wait for other threads in ways of its own: such waiting would take a thread
/// from the pool. With a pool of one thread this is `f()`.
pub fn in_pool<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let threads = rayon::current_num_threads();
    if threads == 1 || !matches!(PLACE.get(), Place::Outside) {
        return f();
    }
    rayon::scope(|_| {
        let pass = Pass(Arc::default());
        let home = rayon::current_thread_index();
        for _ in 0..AWAKE.min(threads - 1) {
            let team = pass.0.clone();
            rayon::spawn(move || {
                // The pass's own thread may come across this while it waits for a part of its work.
                if rayon::current_thread_index() != home {
                    team.watch();
                }
            });
        }
        let _back = Back::from(Place::Pass(&*pass.0));
        f()
    })
}

/// Looks until there is something: for what another thread is about to give, in microseconds.
pub fn spin<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let mut looks = 0;
    loop {
        if let Some(found) = look() {
            return found;
        }
        looks += 1;
        match looks < PATIENCE {
            true => std::hint::spin_loop(),
            // Whoever is waited for may not even be running: make room.
            false => std::thread::yield_now(),
        }
    }
}

/// Threads of the pass this thread runs, itself included; 1 outside of passes and inside of their tasks.
pub fn team_size() -> usize {
    match PLACE.get() {
        Place::Pass(_) => rayon::current_num_threads().min(AWAKE + 1),
        Place::Outside | Place::Task => 1,
    }
}

/// `f(0)` to `f(tasks - 1)` in any order and on any threads, where their `work` together is worth it
/// (see [`should_parallelise`]).
pub fn for_each_task(work: usize, tasks: usize, f: impl Fn(usize) + Sync) {
    if tasks < 2 || !should_parallelise(work) {
        return (0..tasks).for_each(f);
    }
    match PLACE.get() {
        // SAFETY: the place is left before its team goes.
        Place::Pass(team) if work < LARGE_WORK => unsafe { &*team }.run(tasks, &f),
        _ => (0..tasks).into_par_iter().for_each(&f),
    }
}

/// [`for_each_task`] over pieces of `len` elements, the last one maybe shorter: `f(i, piece i)`.
pub fn for_each_piece<T: Send>(
    work: usize,
    xs: &mut [T],
    len: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    /// Where the pieces lie.
    struct Start<T>(*mut T);
    // SAFETY: every task takes another piece, and `T` may move between threads.
    unsafe impl<T: Send> Sync for Start<T> {}

    let (start, total, len) = (Start(xs.as_mut_ptr()), xs.len(), len.max(1));
    let start = &start;
    for_each_task(work, total.div_ceil(len), |i| {
        let n = len.min(total - i * len);
        // SAFETY: inside of `xs`, which is borrowed for this call, and no other task's.
        f(i, unsafe {
            std::slice::from_raw_parts_mut(start.0.add(i * len), n)
        });
    });
}

/// The threads of a pass.
#[derive(Default)]
struct Team {
    /// What there is to do; null between operations.
    job: AtomicPtr<Job>,
    /// Threads that may hold on to the job.
    busy: AtomicUsize,
    /// The pass is over.
    done: AtomicBool,
}

/// An operation: on the stack of the pass's own thread, which stays until nobody is [`Team::busy`].
struct Job {
    f: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job {
    /// Takes tasks until none is left.
    fn work(&self) {
        // SAFETY: `f` outlives the job, and the job everyone who works on it.
        let f = unsafe { &*self.f };
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.tasks {
                return;
            }
            f(i);
        }
    }
}

impl Team {
    /// [`for_each_task`] with this team.
    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let mut job = Job {
            // SAFETY: only the lifetime changes; `Finish` keeps this call from ending before the job.
            f: unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const _>(f) },
            tasks,
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
        };
        {
            let _back = Back::from(Place::Task);
            let _finish = Finish(self);
            let job = &raw mut job;
            self.job.store(job, Ordering::SeqCst);
            // SAFETY: shared with the team from here on, and only read.
            unsafe { &*job }.work();
        }
        let panic = job.panic.get_mut().ok().and_then(Option::take);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Works on the job in the slot, if there is one.
    fn help(&self) -> bool {
        if self.job.load(Ordering::Relaxed).is_null() {
            return false;
        }
        self.busy.fetch_add(1, Ordering::SeqCst);
        // Once more: whoever empties the slot after this waits until the thread is no longer busy.
        let job = self.job.load(Ordering::SeqCst);
        // SAFETY: not null, so it stays while this thread is busy.
        let worked = unsafe { job.as_ref() }.is_some_and(|job| {
            let _back = Back::from(Place::Task);
            let open = job.next.load(Ordering::Relaxed) < job.tasks;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job.work())) {
                job.next.store(job.tasks, Ordering::Relaxed);
                if let Ok(mut kept) = job.panic.lock() {
                    kept.get_or_insert(panic);
                }
            }
            open
        });
        self.busy.fetch_sub(1, Ordering::SeqCst);
        worked
    }

    /// Does what the pass hands out until it is over or nothing has come for a while.
    fn watch(&self) {
        let mut idle = 0;
        while idle < PATIENCE && !self.done.load(Ordering::Relaxed) {
            if self.help() {
                idle = 0;
                continue;
            }
            std::hint::spin_loop();
            idle += 1;
            if idle % LOOKS == 0 && rayon::yield_now() == Some(rayon::Yield::Executed) {
                idle = 0;
            }
        }
    }
}

/// Empties the slot and waits for those who still work, also when a panic passes.
struct Finish<'a>(&'a Team);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.job.store(ptr::null_mut(), Ordering::SeqCst);
        spin(|| (self.0.busy.load(Ordering::SeqCst) == 0).then_some(()));
    }
}

/// Tells the watching threads that the pass is over, also when it panics.
struct Pass(Arc<Team>);

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("threads can be made").install(f)
    }

    #[test]
    fn passes_end_with_their_result_or_their_panic() {
        for threads in [1, 2, 5] {
            with_threads(threads, || {
                for n in 0..50usize {
                    let sum = in_pool(|| (0..n).into_par_iter().sum::<usize>());
                    assert_eq!(sum, n * n.saturating_sub(1) / 2);
                    let pass = || in_pool(|| assert!(n > 100, "as planned"));
                    assert!(catch_unwind(AssertUnwindSafe(pass)).is_err());
                }
            });
        }
    }

    #[test]
    fn every_piece_is_worked_on_once() {
        for threads in [1, 2, 5] {
            with_threads(threads, || {
                in_pool(|| {
                    for n in (0..400).chain([5000]) {
                        // As small as a team takes, and as large as only the pool does.
                        for work in [0, TEAM_WORK, LARGE_WORK] {
                            let mut xs = vec![0usize; n];
                            for_each_piece(work, &mut xs, 7, |i, piece| {
                                // What a task contains is not split again by the team.
                                for_each_piece(TEAM_WORK, piece, 2, |j, pair| {
                                    pair.iter_mut().for_each(|x| *x += 7 * i + 2 * j + 1);
                                });
                            });
                            let want = |k: usize| k / 7 * 7 + k % 7 / 2 * 2 + 1;
                            assert!(xs.iter().enumerate().all(|(k, x)| *x == want(k)));
                        }
                    }
                });
            });
        }
    }

    #[test]
    fn a_task_that_panics_ends_the_operation_and_no_other() {
        with_threads(4, || {
            in_pool(|| {
                for bad in 0..64usize {
                    let op = || for_each_task(TEAM_WORK, 64, |i| assert!(i != bad, "as planned"));
                    assert!(catch_unwind(AssertUnwindSafe(op)).is_err());
                    let done = AtomicUsize::new(0);
                    for_each_task(TEAM_WORK, 64, |_| {
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                    assert_eq!(done.into_inner(), 64);
                }
            });
        });
    }
}
