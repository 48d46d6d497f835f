//! Steps and draft steps captured as CUDA graphs.
//!
//! A step of one token is ten or more launches a layer, each of which takes the host longer than the GPU.
//! What the launches are depends on the step's layout alone: the shapes of its host values, which the plans
//! of [`AttnPlan`](deepseek_v41_attention::AttnPlan::on_host) and
//! [`DraftPlan`](deepseek_v41_attention::DraftPlan::on_host) make the same for many positions. So
//! the launches of a layout are captured when it comes for the second time; from then on a step copies its
//! host values to where the captured ones were and launches the graph.

mod draft;
mod step;

use std::sync::{Arc, Weak};

use candle_core::{CudaDevice, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cuda::{Graph, Scratch, Staged},
};

use crate::ForwardOutput;

/// Tokens of a step that is worth keeping.
const MAX_TOKENS: usize = 16;
/// Layouts kept at a time, of each kind.
const MAX_KEPT: usize = 64;

/// What launches depend on.
type Layout = Vec<usize>;

/// The host values of a pass.
pub(crate) trait HostInputs: Sized {
    /// With each tensor replaced by what `f` makes of it, always in the same order.
    fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;

    /// All tensors in the order of [`HostInputs::map`].
    fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut all = Vec::new();
        self.map(&mut |tensor| {
            all.push(tensor.clone());
            Ok(tensor.clone())
        })?;
        Ok(all)
    }

    /// The inputs on `dev`, and the memory they share.
    fn staged(&self, dev: &CudaDevice) -> Result<(Self, Staged)> {
        let staged = Staged::new(dev, &self.tensors()?)?;
        let mut at = staged.tensors().iter();
        let moved = self.map(&mut |_| {
            let own = at.next().cloned();
            own.ok_or_else(|| Error::shape("step", "fewer tensors than before"))
        })?;
        Ok((moved, staged))
    }
}

/// What was captured with the addresses of one state.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    pub(crate) steps: Captures<ForwardOutput>,
    pub(crate) drafts: Captures<draft::Outputs>,
    /// Where captured launches keep what is between them.
    scratch: Option<Arc<Scratch>>,
}

impl Replays {
    pub(crate) fn set(&mut self, on: bool) {
        self.steps.set(on);
        self.drafts.set(on);
        self.scratch = None;
    }

    fn scratch(&mut self, dev: &CudaDevice) -> Result<Option<Arc<Scratch>>> {
        if self.scratch.is_none() {
            self.scratch = Scratch::new(dev)?;
        }
        Ok(self.scratch.clone())
    }
}

/// The captured passes of one kind, with what they give.
#[derive(Debug)]
pub(crate) struct Captures<O> {
    on: bool,
    /// The model they were captured with.
    model: Weak<()>,
    /// Layouts that came once.
    seen: Vec<Layout>,
    /// The one used last at the end.
    kept: Vec<Kept<O>>,
    replayed: u64,
}

/// One captured pass.
#[derive(Debug)]
struct Kept<O> {
    layout: Layout,
    graph: Graph,
    inputs: Staged,
    /// What a replay writes over.
    outputs: O,
}

/// What to do with a pass.
enum Turn<O> {
    /// To launch it: it is not replayed, or not yet.
    Launch,
    /// To capture and keep it.
    Capture(Layout),
    /// To replay this one, which is to be kept again.
    Replay(Kept<O>),
}

impl<O> Default for Captures<O> {
    fn default() -> Self {
        Self {
            on: true,
            model: Weak::new(),
            seen: Vec::new(),
            kept: Vec::new(),
            replayed: 0,
        }
    }
}

impl<O> Captures<O> {
    fn set(&mut self, on: bool) {
        *self = Self {
            on,
            replayed: self.replayed,
            ..Self::default()
        };
    }

    /// Passes replayed so far.
    pub(crate) fn replayed(&self) -> u64 {
        self.replayed
    }

    /// What to do with a pass of `layout` of the model known by `model`.
    fn turn(&mut self, model: &Arc<()>, layout: Layout) -> Turn<O> {
        if !std::ptr::eq(self.model.as_ptr(), Arc::as_ptr(model)) {
            self.set(self.on);
            self.model = Arc::downgrade(model);
        }
        if let Some(at) = self.kept.iter().position(|k| k.layout == layout) {
            return Turn::Replay(self.kept.remove(at));
        }
        // The first pass of a layout loads its kernels, which a capture must not.
        if !self.seen.contains(&layout) {
            if self.seen.len() > 4 * MAX_KEPT {
                self.seen.clear();
            }
            self.seen.push(layout);
            return Turn::Launch;
        }
        Turn::Capture(layout)
    }

    /// Runs `kept`, whose inputs are there, and keeps it; gives what `outputs` makes of its own.
    fn run<R>(
        &mut self,
        mut kept: Kept<O>,
        outputs: impl FnOnce(&O) -> Result<R>,
    ) -> Result<Option<R>> {
        kept.graph.launch()?;
        let given = outputs(&kept.outputs)?;
        self.replayed += 1;
        if self.kept.len() == MAX_KEPT {
            self.kept.remove(0);
        }
        self.kept.push(kept);
        Ok(Some(given))
    }

    /// Nothing of this kind is captured any more.
    fn refused(&mut self, what: &str, err: &Error) {
        tracing::warn!("{what} are not replayed, since one could not be captured: {err}");
        self.set(false);
    }
}

/// Puts the shapes of `tensors` into `layout`.
fn shapes(tensors: &[Tensor], layout: &mut Layout) {
    for tensor in tensors {
        layout.push(tensor.rank());
        layout.extend(tensor.dims());
    }
}
