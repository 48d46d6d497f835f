//! Many requests over one set of weights, a step at a time.
//!
//! A step is one forward pass over a mix of tokens: the newest token of every text that is being
//! generated, with the drafts behind it, and pieces of prompts in what the budget leaves. Since a row of
//! a pass depends on its own sequence alone, bit for bit, a request gets the tokens it would get from
//! [`DeepSeekV41::generate`], whoever else is served.
//!
//! * **Order.** First come, first served. Texts being generated go before prompts, and at least a
//!   quarter of the budget is for prompts.
//! * **Room.** A sequence takes a slot of the state, and its tokens count against
//!   [`EngineLimits::kv_tokens`]. When those run out, kept prefixes go first, the least recently used
//!   first; then the youngest request goes back to the head of the queue and is computed again later.
//! * **Prefixes.** Finished texts stay in their slots until those are needed. Where a request shares a
//!   beginning with another one, a fork is kept at the end of it, at a multiple of the largest
//!   compression ratio, where no group is open.
//! * **Failures.** An error that belongs to one request ends that request. If a pass fails, its
//!   requests are run again one by one, and the culprit's error is its own.
//!
//! ```no_run
//! # use deepseek_v41::{DeepSeekV41, GenerateOptions, Result, engine::{Engine, EngineLimits}};
//! # fn main() -> Result<()> {
//! # let model = DeepSeekV41::load("checkpoint")?;
//! let mut engine = Engine::new(&model, EngineLimits::default())?;
//! let first = engine.submit("Once upon a time", &GenerateOptions::default())?;
//! engine.submit("The capital of France is", &GenerateOptions::default())?;
//! while !engine.is_idle() {
//!     for update in engine.step() {
//!         if update.id == first {
//!             println!("{:?}", update.event?);
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod job;
mod pass;
mod prefix;
mod types;

use std::collections::VecDeque;

use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{IndexKeys, ModelState, SequenceId};
use job::Job;
use prefix::{Prefix, Prefixes};
pub use types::{EngineLimits, EngineStats, RequestId, Update};

use crate::{DeepSeekV41, GenerateOptions, Prompt, Sampler};

/// See the [module documentation](self).
pub struct Engine<'m> {
    model: &'m DeepSeekV41,
    limits: EngineLimits,
    state: ModelState,
    waiting: VecDeque<Job<'m>>,
    /// In the order of their arrival.
    running: Vec<Job<'m>>,
    prefixes: Prefixes,
    /// Prefixes end at multiples of this.
    group: usize,
    next_id: u64,
    updates: Vec<Update>,
    stats: EngineStats,
}

impl<'m> Engine<'m> {
    /// An engine without requests.
    ///
    /// # Errors
    /// Limits that the model cannot have; [`Error::Unsupported`] for a model loaded with
    /// [`IndexKeys::LastPublished`], whose results depend on how a prompt is cut.
    pub fn new(model: &'m DeepSeekV41, limits: EngineLimits) -> Result<Self> {
        if model.config().index_keys == IndexKeys::LastPublished {
            return Err(Error::Unsupported {
                what: "serving with the official decode loop's stale index keys".into(),
            });
        }
        if limits.kv_tokens < limits.state.max_len {
            let (needed, available) = (limits.state.max_len, limits.kv_tokens);
            return Err(Error::Capacity {
                what: "kv_tokens",
                needed,
                available,
            });
        }
        let transformer = model.transformer();
        Ok(Self {
            state: ModelState::new(model.config(), limits.state, transformer.device())?,
            group: transformer.plan().ratios().into_iter().max().unwrap_or(1),
            model,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            prefixes: Prefixes::default(),
            next_id: 0,
            updates: Vec::new(),
            stats: EngineStats::default(),
        })
    }

    /// Takes a request; [`Engine::step`] works on it. `options.prefill_chunk` has no meaning here.
    ///
    /// # Errors
    /// A prompt that cannot be encoded, is empty, has tokens outside of the vocabulary or does not
    /// fit; options without a meaning.
    pub fn submit(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<RequestId> {
        let id = RequestId(self.next_id);
        let max_len = self.limits.state.max_len;
        let mut job = Job::new(self.model, id, prompt.into(), options, max_len)?;
        self.next_id += 1;
        match job.text.is_finished() {
            // Nothing is wanted of it.
            true => self.report(&mut job),
            false => self.waiting.push_back(job),
        }
        Ok(id)
    }

    /// A request's sampler, to add hooks to it; `None` once it has ended.
    pub fn sampler(&mut self, id: RequestId) -> Option<&mut Sampler> {
        let mut jobs = self.running.iter_mut().chain(&mut self.waiting);
        jobs.find(|job| job.id == id)
            .map(|job| &mut job.text.sampler)
    }

    /// Ends a request without another event. Returns whether it was there.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.running.iter().position(|job| job.id == id) {
            let mut job = self.running.remove(at);
            self.free(&mut job);
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|job| job.id != id);
        self.waiting.len() < before
    }

    /// Whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.updates.is_empty()
    }

    /// What it has done so far.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// The limits it was made with.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// One pass, and what came of it.
    pub fn step(&mut self) -> Vec<Update> {
        self.make_room();
        let decoding = self.decode_tokens();
        let budget = self.limits.step_tokens;
        self.admit(budget.saturating_sub(decoding).max(budget / 4).max(1));
        self.pass();
        std::mem::take(&mut self.updates)
    }

    /// Tokens that the texts being generated may add in a step.
    fn decode_tokens(&self) -> usize {
        let most = |job: &Job<'_>| job.most_drafts(self.limits.state.max_rollback) + 1;
        self.running
            .iter()
            .filter(|job| job.is_decoding())
            .map(most)
            .sum()
    }

    /// Tokens for which the caches still have room after this step's.
    fn room(&self) -> usize {
        let planned: usize = self.running.iter().map(|job| job.piece).sum();
        let used = self.state.tokens() + self.decode_tokens() + planned;
        self.limits.kv_tokens.saturating_sub(used)
    }

    /// Frees tokens of the caches until every text being generated can go on.
    fn make_room(&mut self) {
        self.running.iter_mut().for_each(|job| job.piece = 0);
        while self.state.tokens() + self.decode_tokens() > self.limits.kv_tokens {
            if !self.evict() && !self.preempt() {
                break;
            }
        }
    }

    /// Gives up a kept prefix.
    fn evict(&mut self) -> bool {
        let Some(prefix) = self.prefixes.take_oldest() else {
            return false;
        };
        self.stats.evictions += 1;
        self.release(prefix.seq);
        true
    }

    /// Sends the youngest request back to the queue, unless it is the only one.
    fn preempt(&mut self) -> bool {
        if self.running.len() < 2 {
            return false;
        }
        let Some(mut job) = self.running.pop() else {
            return false;
        };
        self.free(&mut job);
        self.stats.preemptions += 1;
        self.waiting.push_front(job);
        true
    }

    /// Plans the step's pieces of prompts, `budget` tokens in all: first for the requests that have a
    /// slot, then for those that can get one.
    fn admit(&mut self, budget: usize) {
        let mut left = self.plan_pieces(budget);
        // After a failed pass its requests run one by one.
        while left > 0 && !self.running.iter().any(|job| job.alone) {
            if (self.room() == 0 && !self.evict()) || !self.start_next() {
                break;
            }
            let room = self.room();
            if let Some(job) = self.running.last_mut() {
                job.plan_piece(left.min(room));
                left = left.saturating_sub(job.piece);
            }
        }
    }

    /// Shares `budget` tokens out among the running requests; returns what is left of them.
    fn plan_pieces(&mut self, budget: usize) -> usize {
        loop {
            self.running.iter_mut().for_each(|job| job.piece = 0);
            let (mut left, mut room) = (budget, self.room());
            for job in self.running.iter_mut().filter(|job| !job.is_decoding()) {
                job.plan_piece(left.min(room));
                left = left.saturating_sub(job.piece);
                room = room.saturating_sub(job.piece);
            }
            let starved = room == 0 && left > 0;
            let idle = !self.running.is_empty() && self.planned().is_empty();
            if !(starved && self.evict() || idle && self.preempt()) {
                return left;
            }
        }
    }

    /// Gives the first request in the queue a slot. `false` if it has to wait.
    fn start_next(&mut self) -> bool {
        let Some(job) = self.waiting.front() else {
            return false;
        };
        let hit = self.prefixes.find(job);
        let begins = hit.map_or(0, |(_, len)| len);
        // Somebody is about to reach the end of what the two share: worth waiting for.
        let coming = |other: &Job<'_>| {
            let shared = job.shared_with(&other.ids);
            let kept = other.cut.filter(|cut| other.run < *cut);
            job.images.is_empty() && kept.is_some_and(|cut| begins < cut && cut <= shared)
        };
        if self.running.iter().any(coming) {
            return false;
        }
        let Some((seq, begins)) = self.slot_for(hit) else {
            return false;
        };
        let Some(mut job) = self.waiting.pop_front() else {
            return false;
        };
        (job.seq, job.run) = (Some(seq), begins);
        if begins > 0 {
            self.stats.prefix_hits += 1;
            self.stats.prefix_tokens += begins;
        }
        job.cut = self.cut_for(&job);
        self.running.push(job);
        true
    }

    /// A sequence for a request and how many of its tokens it holds: a fork of the prefix `hit`, the
    /// prefix itself if there is no slot for a fork, or a new one.
    fn slot_for(&mut self, hit: Option<(usize, usize)>) -> Option<(SequenceId, usize)> {
        let full = self.state.available() == 0;
        if let Some((at, len)) = hit {
            if full && self.prefixes.len() == 1 {
                return Some((self.prefixes.take(at).seq, len));
            }
            let source = self.prefixes.touch(at);
            // The one just touched is the newest and stays.
            if !full || self.evict() {
                return Some((self.state.fork(source, len).ok()?, len));
            }
        }
        if full && !self.evict() {
            return None;
        }
        Some((self.state.create().ok()?, 0))
    }

    /// Where a request's prompt is worth keeping: at the end of the longest beginning it shares with
    /// another one, if that is not kept yet.
    fn cut_for(&self, job: &Job<'_>) -> Option<usize> {
        if !job.images.is_empty() {
            return None;
        }
        let jobs = self
            .waiting
            .iter()
            .chain(&self.running)
            .filter(|other| other.images.is_empty());
        let texts = jobs.map(|other| &other.ids).chain(self.prefixes.texts());
        let shared = texts.map(|ids| job.shared_with(ids)).max()?;
        let cut = shared / self.group * self.group;
        (cut > job.run && cut >= self.limits.min_prefix).then_some(cut)
    }

    /// Keeps a fork of what a running request has run so far.
    fn keep_fork(&mut self, job: &Job<'_>) {
        let (Some(seq), ids) = (job.seq, job.ids[..job.run].to_vec()) else {
            return;
        };
        let fits = self.state.tokens() + ids.len() <= self.limits.kv_tokens;
        // An older prefix makes place, but no request does.
        if self.prefixes.contains(&ids) || !fits || (self.state.available() == 0 && !self.evict()) {
            return;
        }
        if let Ok(seq) = self.state.fork(seq, ids.len()) {
            let drafted = self.state.drafted(seq).is_ok_and(|n| n == ids.len());
            self.prefixes.keep(Prefix { seq, ids, drafted });
        }
    }

    /// Leaves an ended request's sequence in its slot, for texts that go on from it.
    fn keep_finished(&mut self, mut job: Job<'m>) {
        let len = job.run / self.group * self.group;
        let ids = job.ids[..len].to_vec();
        let useful = job.images.is_empty()
            && len >= self.limits.min_prefix
            && !self.prefixes.contains(&ids)
            && self.show_unseen(&mut job).is_ok();
        match job.seq {
            Some(seq) if useful && self.state.truncate(seq, len).is_ok() => {
                let drafted = self.state.drafted(seq).is_ok_and(|n| n == len);
                self.prefixes.keep(Prefix { seq, ids, drafted });
            }
            _ => self.free(&mut job),
        }
    }

    /// Hands out a job's events.
    fn report(&mut self, job: &mut Job<'m>) {
        while let Some(event) = job.text.next_event() {
            self.updates.push(Update {
                id: job.id,
                event: Ok(event),
            });
        }
    }

    /// Takes a job's slot away; its text stays, to be run again.
    fn free(&mut self, job: &mut Job<'m>) {
        (job.run, job.unseen, job.cut) = (0, None, None);
        if let Some(seq) = job.seq.take() {
            self.release(seq);
        }
    }

    fn release(&mut self, seq: SequenceId) {
        let released = self.state.release(seq);
        debug_assert!(released.is_ok(), "slots in use are live");
    }
}
