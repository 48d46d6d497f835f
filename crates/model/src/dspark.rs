//! DSpark: draft heads that propose a block of tokens from the backbone's hidden states.

mod choose;
mod inputs;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use deepseek_v41_attention::{DSparkAttention, LayerRole, WindowCache};
use deepseek_v41_core::{Comm, Error, LocalComm, Result, RmsNorm, Rope, VarBuilder, best};
use deepseek_v41_hyperconn::{Flow, HyperConn, PreMix, Site, hc_expand, hc_pre};
use deepseek_v41_quant::{Linear, WeightFormat};

pub use self::choose::most_likely;
pub(crate) use self::inputs::DraftInputs;
#[cfg(feature = "cuda")]
use crate::replay::HostInputs;
use crate::{
    Config, ModelState, Probe, SequenceId, Transformer, block::FeedForward, embed::Embedding,
    probe::NoProbe, transformer::pooled, wave,
};

/// The draft head (`mtp.*`): some layers of its own on the backbone's embedding and output head.
#[derive(Debug)]
pub struct DSpark {
    pub(crate) cfg: Config,
    pub(crate) device: Device,
    main_proj: Linear,
    main_norm: RmsNorm,
    pub(crate) stages: Vec<Stage>,
    norm: RmsNorm,
    markov_embed: Embedding,
    markov_head: Linear,
    confidence: Linear,
    embed: Embedding,
    head: Linear,
    rope: Rope,
    pub(crate) ranks: usize,
    /// Whom captured draft steps belong to.
    #[cfg(feature = "cuda")]
    pub(crate) identity: Arc<()>,
}

/// What a pass over the blocks ends with.
#[derive(Debug, Clone)]
pub(crate) enum Blocks {
    /// Something to choose from.
    Hidden {
        /// `[blocks * block_size, dim]`, collapsed but not normed.
        xs: Tensor,
        /// `[blocks * block_size, vocab_size]` f32, without the bias of the token before.
        logits: Tensor,
    },
    /// The most likely tokens, on a GPU.
    Chosen {
        /// `[blocks, block_size]` u32, as [`argmax`](deepseek_v41_core::argmax) gives them.
        codes: Tensor,
        /// `[blocks * block_size]` f32.
        confidence: Tensor,
    },
}

#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) hc_attn: HyperConn,
    pub(crate) attn_norm: RmsNorm,
    pub(crate) attn: DSparkAttention,
    pub(crate) ffn: FeedForward,
}

/// Picks the token of a drafted position: request, position in its block, logits → token.
pub type ChooseToken<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<u32> + 'a;

/// What one sequence asks of a draft step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftRequest {
    /// The sequence; every token of it must be there to stay.
    pub seq: SequenceId,
    /// Rows of `target_hidden` that belong to it: its tokens since its last draft step.
    pub committed: usize,
    /// The token that comes next and has not been run; `None` only feeds the rings.
    pub next: Option<u32>,
}

/// A drafted block of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Proposed tokens, `[block_size]`, to follow the request's `next`.
    pub tokens: Vec<u32>,
    /// The logits each was chosen from, `[block_size][vocab_size]`; empty where a GPU chose.
    pub logits: Vec<Vec<f32>>,
    /// Confidence of each position, `[block_size]`: a logit; its sigmoid is the probability that the
    /// token is accepted if all before it were.
    pub confidence: Vec<f32>,
}

impl DSpark {
    /// Loads the draft head of `transformer`'s checkpoint; `vb` is the checkpoint's root.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the config has no draft head, or [`Error::Weight`].
    pub fn new(transformer: &Transformer, vb: VarBuilder) -> Result<Self> {
        Self::with_comm(transformer, Arc::new(LocalComm), vb)
    }

    /// [`DSpark::new`] as one rank of several.
    ///
    /// # Errors
    /// As [`DSpark::new`].
    pub fn with_comm(
        transformer: &Transformer,
        comm: Arc<dyn Comm>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let cfg = transformer.config();
        if cfg.dspark_block_size == 0 {
            return Err(Error::Unsupported {
                what: "drafting with a checkpoint that has no draft head".into(),
            });
        }
        let mtp = vb.pp("mtp");
        let (first, last) = (mtp.pp(0), mtp.pp(cfg.n_mtp_layers - 1));
        let targets = cfg.dspark_target_layer_ids.len();
        let rank = cfg.dspark_markov_rank;
        let markov = last.pp("markov_head");
        let f32 = WeightFormat::F32;
        Ok(Self {
            main_proj: Linear::new(
                cfg.dim * targets,
                cfg.dim,
                cfg.linear_format(),
                first.pp("main_proj"),
            )?,
            main_norm: RmsNorm::new(cfg.dim, cfg.norm_eps, first.pp("main_norm"))?,
            stages: (0..cfg.n_mtp_layers)
                .map(|i| Stage::new(cfg, i, &comm, mtp.pp(i)))
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(cfg.dim, cfg.norm_eps, last.pp("norm"))?,
            markov_embed: Embedding::new(cfg.vocab_size, rank, markov.pp("embed"))?,
            markov_head: Linear::new(rank, cfg.vocab_size, f32, markov.pp("head"))?,
            confidence: Linear::new(
                cfg.dim + rank,
                1,
                f32,
                last.pp("confidence_head").pp("proj"),
            )?,
            embed: transformer.embed().clone(),
            head: transformer.head().clone(),
            rope: Rope::new(&cfg.window_rope())?,
            device: transformer.device().clone(),
            ranks: comm.world_size(),
            #[cfg(feature = "cuda")]
            identity: Arc::default(),
            cfg: cfg.clone(),
        })
    }

    /// Tokens proposed a step.
    pub fn block_size(&self) -> usize {
        self.cfg.dspark_block_size
    }

    /// Feeds the committed tokens' hidden states to the rings and drafts a block for every request
    /// with a next token.
    ///
    /// `target_hidden: [M, targets * dim]` bf16 holds the requests' committed rows end to end, as
    /// [`ForwardOutput::target_hidden`](crate::ForwardOutput::target_hidden) gives them. `choose` picks
    /// the token of a position from its logits: it is called with the request's index, the position
    /// in the block and the logits.
    ///
    /// → one entry a request, `None` for those without a next token.
    ///
    /// # Errors
    /// [`Error::Value`] when a sequence's committed rows do not continue where its rings end, shapes
    /// that do not fit, or an error of `choose`.
    ///
    /// Reference: `Transformer.forward_spec`, for any number of committed tokens.
    pub fn draft(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &mut ModelState,
        choose: &mut ChooseToken<'_>,
    ) -> Result<Vec<Option<Draft>>> {
        let blocks = pooled(&self.device, self.ranks, || {
            self.pass(requests, target_hidden, state, false, None)
        })?;
        self.drafts(requests, blocks, choose)
    }

    /// [`DSpark::draft`] with the most likely token at every position, the lowest among equals.
    ///
    /// On a GPU positions follow each other without a word to the host, and tokens and confidences alone
    /// come back.
    ///
    /// # Errors
    /// As [`DSpark::draft`]; [`Error::Value`] for logits from which nothing can be chosen.
    pub fn draft_best(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &mut ModelState,
    ) -> Result<Vec<Option<Draft>>> {
        let best_there = self.markov_embed.is_on_device();
        let blocks = pooled(&self.device, self.ranks, || {
            self.pass(requests, target_hidden, state, best_there, None)
        })?;
        let mut choose = |_: usize, _: usize, logits: &[f32]| most_likely(best(logits));
        self.drafts(requests, blocks, &mut choose)
    }

    /// [`DSpark::draft`] under observation; draft layers follow the backbone's in number.
    ///
    /// # Errors
    /// As [`DSpark::draft`], and those of the probe.
    pub fn draft_probed(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &mut ModelState,
        choose: &mut ChooseToken<'_>,
        probe: &mut dyn Probe,
    ) -> Result<Vec<Option<Draft>>> {
        let blocks = self.pass(requests, target_hidden, state, false, Some(probe))?;
        self.drafts(requests, blocks, choose)
    }

    /// Everything before the first choice or, with `choose`, before a word to the host; `None` when there
    /// are no blocks to choose for.
    fn pass(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &mut ModelState,
        choose: bool,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Option<Blocks>> {
        let inputs = self.inputs(requests, target_hidden, state)?;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(dev) = &self.device {
            if probe.is_none()
                && let Some(blocks) = self.replay(dev, &inputs, target_hidden, state, choose)?
            {
                shown(requests, state)?;
                return Ok(Some(blocks));
            }
            let (inputs, _) = inputs.staged(dev)?;
            return self.compute(requests, &inputs, target_hidden, state, choose, probe);
        }
        self.compute(requests, &inputs, target_hidden, state, choose, probe)
    }

    /// [`DSpark::pass`] with inputs where it computes.
    fn compute(
        &self,
        requests: &[DraftRequest],
        inputs: &DraftInputs,
        target_hidden: &Tensor,
        state: &mut ModelState,
        choose: bool,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Option<Blocks>> {
        let rows = inputs.plan.main_positions.len();
        let filling = rows - target_hidden.dims()[0];
        match filling {
            0 => self.commit(inputs, target_hidden, &mut state.draft)?,
            _ => {
                let hidden = target_hidden.pad_with_zeros(0, 0, filling)?;
                self.commit(inputs, &hidden, &mut state.draft)?;
            }
        }
        // Should the blocks fail, the rows are there all the same.
        shown(requests, state)?;
        match inputs.ids.is_empty() {
            true => Ok(None),
            false => self.blocks(inputs, state, choose, probe).map(Some),
        }
    }

    /// Puts the committed tokens into the rings; `hidden: [M, targets * dim]` as the plan has them.
    pub(crate) fn commit(
        &self,
        inputs: &DraftInputs,
        hidden: &Tensor,
        rings: &mut [WindowCache],
    ) -> Result<()> {
        let DraftInputs { plan, ropes, .. } = inputs;
        if plan.main_positions.is_empty() {
            return Ok(());
        }
        let main_x = self.main_norm.forward(&self.main_proj.forward(hidden)?)?;
        for (stage, cache) in self.stages.iter().zip(rings) {
            stage.attn.commit(&main_x, plan, ropes, cache)?;
        }
        Ok(())
    }

    /// Runs the blocks, of which there are some, and chooses from their logits if asked.
    pub(crate) fn blocks(
        &self,
        inputs: &DraftInputs,
        state: &ModelState,
        choose: bool,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Blocks> {
        let xs = self.layers(inputs, state, probe)?;
        let logits = self.head.forward(&self.norm.forward(&xs)?)?;
        match (&inputs.next, choose) {
            (Some(next), true) => self.chosen(next, &xs, &logits),
            _ => Ok(Blocks::Hidden { xs, logits }),
        }
    }

    /// Runs the blocks through the stages → `[blocks * block_size, dim]`, collapsed but not normed.
    fn layers(
        &self,
        inputs: &DraftInputs,
        state: &ModelState,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Tensor> {
        let DraftInputs {
            plan, ropes, ids, ..
        } = inputs;
        let stream = match &inputs.rows {
            Some(rows) => self.embed.copies(rows, self.cfg.hc_mult)?,
            None => hc_expand(&self.embed.forward(ids)?, self.cfg.hc_mult)?,
        };
        let carried = PreMix::from_tensor(inputs.carried.clone())?;
        let parts = match probe.is_none() && self.device.is_cpu() && self.ranks == 1 {
            true => wave::parts(&self.cfg, ids.len()),
            false => 1,
        };
        if parts > 1 {
            return self.side_by_side(parts, &stream, &carried, plan, ropes, state);
        }
        let mut unobserved = NoProbe;
        let probe = probe.unwrap_or(&mut unobserved);
        let mut flow = Flow::new(stream, carried);
        for (stage, cache) in self.stages.iter().zip(&state.draft) {
            let xs = flow.enter(&stage.hc_attn, &stage.attn_norm)?;
            flow.leave(stage.attn.forward(&xs, plan, ropes, cache)?)?;
            // Drafts are text: no image mask, whatever the prompt held.
            stage.ffn.forward(&mut flow, None, probe)?;
        }
        let (stream, carried) = flow.finish()?;
        hc_pre(&stream, &carried)
    }
}

/// All tokens of the requests' sequences are in the rings.
fn shown(requests: &[DraftRequest], state: &mut ModelState) -> Result<()> {
    for request in requests {
        let sequence = state.sequence_mut(request.seq)?;
        sequence.drafted = sequence.ids.len();
    }
    Ok(())
}

impl Stage {
    fn new(cfg: &Config, i: usize, comm: &Arc<dyn Comm>, vb: VarBuilder) -> Result<Self> {
        let attention = cfg.attention(LayerRole::Window);
        Ok(Self {
            hc_attn: HyperConn::new(&cfg.hyperconn(), Site::Attn, vb.clone())?,
            attn_norm: RmsNorm::new(cfg.dim, cfg.norm_eps, vb.pp("attn_norm"))?,
            attn: DSparkAttention::new(&attention, comm.clone(), vb.pp("attn"))?,
            ffn: FeedForward::new(cfg, &cfg.draft_moe(), cfg.n_layers + i, comm, &vb)?,
        })
    }
}
