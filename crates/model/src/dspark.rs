//! DSpark: draft heads that propose a block of tokens from the backbone's hidden states.

mod choose;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use deepseek_v41_attention::{
    ChunkSpec, DSparkAttention, DraftChunk, DraftPlan, DraftRopes, LayerRole,
};
use deepseek_v41_core::{Comm, Error, LocalComm, Result, RmsNorm, Rope, VarBuilder, best};
use deepseek_v41_hyperconn::{Flow, HyperConn, PreMix, Site, hc_expand, hc_pre};
use deepseek_v41_quant::{Linear, WeightFormat};

pub use self::choose::most_likely;
use crate::{
    Config, ModelState, Probe, SequenceId, Transformer, block::FeedForward, embed::Embedding,
    probe::NoProbe, transformer::pooled, wave,
};

/// The draft head (`mtp.*`): some layers of its own on the backbone's embedding and output head.
#[derive(Debug)]
pub struct DSpark {
    cfg: Config,
    device: Device,
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
    ranks: usize,
}

/// The blocks after the last stage.
struct Hidden {
    /// `[blocks * block_size, dim]`, collapsed but not normed.
    xs: Tensor,
    /// `[blocks * block_size, vocab_size]` f32, without the bias of the token before.
    logits: Tensor,
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
        let hidden = pooled(&self.device, self.ranks, || {
            self.hidden(requests, target_hidden, state, None)
        })?;
        self.tokens(requests, hidden, choose)
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
        if self.markov_embed.is_on_device() {
            let hidden = self.hidden(requests, target_hidden, state, None)?;
            return self.best_tokens(requests, hidden);
        }
        let mut choose = |_: usize, _: usize, logits: &[f32]| most_likely(best(logits));
        self.draft(requests, target_hidden, state, &mut choose)
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
        let hidden = self.hidden(requests, target_hidden, state, Some(probe))?;
        self.tokens(requests, hidden, choose)
    }

    /// Everything before the first choice; `None` when there are no blocks to choose for.
    fn hidden(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &mut ModelState,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Option<Hidden>> {
        let plan = self.plan(requests, target_hidden, state)?;
        let ropes = DraftRopes::new(&plan, &self.rope, &self.device)?;
        if !plan.main_positions.is_empty() {
            let main_x = self
                .main_norm
                .forward(&self.main_proj.forward(target_hidden)?)?;
            for (stage, cache) in self.stages.iter().zip(&mut state.draft) {
                stage.attn.commit(&main_x, &plan, &ropes, cache)?;
            }
        }
        for request in requests {
            let sequence = state.sequence_mut(request.seq)?;
            sequence.drafted = sequence.ids.len();
        }
        if plan.block_positions.is_empty() {
            return Ok(None);
        }
        let xs = self.blocks(requests, &plan, &ropes, state, probe)?;
        let logits = self.head.forward(&self.norm.forward(&xs)?)?;
        Ok(Some(Hidden { xs, logits }))
    }

    fn plan(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &ModelState,
    ) -> Result<DraftPlan> {
        let mut chunks = Vec::with_capacity(requests.len());
        for request in requests {
            let sequence = state.sequence(request.seq)?;
            let (start, len) = (sequence.drafted, request.committed);
            if start + len != sequence.ids.len() {
                return Err(Error::value(
                    "committed tokens",
                    format!(
                        "{len} after {start} do not reach the sequence's {} tokens",
                        sequence.ids.len()
                    ),
                ));
            }
            let committed = ChunkSpec {
                slot: request.seq.slot,
                start: start as u32,
                len: len as u32,
            };
            chunks.push(DraftChunk {
                committed,
                draft: request.next.is_some(),
            });
        }
        let (m, width) = target_hidden.dims2()?;
        let committed: usize = requests.iter().map(|r| r.committed).sum();
        let expected = self.cfg.dspark_target_layer_ids.len() * self.cfg.dim;
        if m != committed || width != expected {
            return Err(Error::shape(
                "draft",
                format!("expected target_hidden [{committed}, {expected}], found [{m}, {width}]"),
            ));
        }
        DraftPlan::new(&chunks, self.block_size(), &state.geometry, &self.device)
    }

    /// Runs the blocks through the stages → `[blocks * block_size, dim]`, collapsed but not normed.
    fn blocks(
        &self,
        requests: &[DraftRequest],
        plan: &DraftPlan,
        ropes: &DraftRopes,
        state: &ModelState,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Tensor> {
        let noise = self.cfg.dspark_noise_token_id as u32;
        let mut ids = Vec::with_capacity(plan.block_positions.len());
        for next in requests.iter().filter_map(|r| r.next) {
            ids.push(next);
            ids.resize(ids.len() + self.block_size() - 1, noise);
        }
        let stream = hc_expand(&self.embed.forward(&ids)?, self.cfg.hc_mult)?;
        let carried = PreMix::one_hot(ids.len(), self.cfg.hc_mult, &self.device)?;
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
