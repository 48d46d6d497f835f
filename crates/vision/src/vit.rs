//! The tower: a transformer over the patches of one image, each seeing all others.

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result, RmsNorm, VarBuilder};

use crate::{
    ImagePatches, VisionConfig,
    ops::{Linear, Rope2d, Rope2dTable, add, apply_rope_2d, full_attention, swiglu},
};

/// The constant of the tower's norms. The text model's is another one.
const NORM_EPS: f32 = 1e-6;

/// Self-attention over all patches of an image.
#[derive(Debug, Clone)]
struct SelfAttention {
    wqkv: Linear,
    wo: Linear,
    heads: usize,
    head_dim: usize,
}

impl SelfAttention {
    fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        let dim = cfg.vision_dim;
        Ok(Self {
            wqkv: Linear::new(dim, 3 * dim, true, vb.pp("wqkv"))?,
            wo: Linear::new(dim, dim, true, vb.pp("wo"))?,
            heads: cfg.vision_n_heads,
            head_dim: cfg.head_dim(),
        })
    }

    /// `[n, dim]` → `[n, dim]`.
    fn forward(&self, xs: &Tensor, table: &Rope2dTable) -> Result<Tensor> {
        let n = xs.dim(0)?;
        // Queries, keys and values stay in one tensor of three times the heads: the first two thirds
        // are rotated.
        let qkv = self
            .wqkv
            .forward(xs)?
            .reshape((n, 3 * self.heads, self.head_dim))?;
        let qkv = apply_rope_2d(&qkv, table, 2 * self.heads)?;
        let qkv = qkv.reshape((n, 3, self.heads, self.head_dim))?;
        self.wo.forward(&full_attention(&qkv)?)
    }
}

/// The gated MLP; its two matrices have no bias.
#[derive(Debug, Clone)]
struct GatedMlp {
    w1: Linear,
    w2: Linear,
}

impl GatedMlp {
    fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        let (dim, inter) = (cfg.vision_dim, cfg.vision_inter_dim);
        Ok(Self {
            w1: Linear::new(dim, 2 * inter, false, vb.pp("w1"))?,
            w2: Linear::new(inter, dim, false, vb.pp("w2"))?,
        })
    }

    /// `[n, dim]` → `[n, dim]`.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.w2.forward(&swiglu(&self.w1.forward(xs)?)?)
    }
}

/// One block of the tower.
#[derive(Debug, Clone)]
pub struct VisionBlock {
    norm1: RmsNorm,
    attn: SelfAttention,
    norm2: RmsNorm,
    mlp: GatedMlp,
}

impl VisionBlock {
    /// Loads `norm1`, `attn.{wqkv,wo}`, `norm2` and `mlp.{w1,w2}` under `vb`.
    ///
    /// # Errors
    /// A weight is missing or does not fit the configuration.
    pub fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm1: RmsNorm::new(cfg.vision_dim, NORM_EPS, vb.pp("norm1"))?,
            attn: SelfAttention::new(cfg, vb.pp("attn"))?,
            norm2: RmsNorm::new(cfg.vision_dim, NORM_EPS, vb.pp("norm2"))?,
            mlp: GatedMlp::new(cfg, vb.pp("mlp"))?,
        })
    }

    /// `xs: [n, dim]` bf16 → same shape.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, xs: &Tensor, table: &Rope2dTable) -> Result<Tensor> {
        let xs = add(xs, &self.attn.forward(&self.norm1.forward(xs)?, table)?)?;
        add(&xs, &self.mlp.forward(&self.norm2.forward(&xs)?)?)
    }
}

/// The whole tower: patches in, one feature vector a patch out.
#[derive(Debug, Clone)]
pub struct Vit {
    patch_embed: Linear,
    blocks: Vec<VisionBlock>,
    norm: RmsNorm,
    rope: Rope2d,
}

impl Vit {
    /// Loads `patch_embed.proj`, `blocks.I` and `norm` under `vb`.
    ///
    /// # Errors
    /// The configuration is impossible, or a weight is missing or does not fit it.
    pub fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let embed = vb.pp("patch_embed").pp("proj");
        Ok(Self {
            patch_embed: Linear::new(cfg.patch_dim(), cfg.vision_dim, true, embed)?,
            blocks: (0..cfg.vision_n_layers)
                .map(|i| VisionBlock::new(cfg, vb.pp("blocks").pp(i)))
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(cfg.vision_dim, NORM_EPS, vb.pp("norm"))?,
            rope: Rope2d::new(cfg.head_dim(), cfg.vision_rope_theta)?,
        })
    }

    /// Features of every patch: `[n_h * n_w, vision_dim]` bf16.
    ///
    /// # Errors
    /// The patches are of another size than the tower's.
    ///
    /// Reference: `ViT.forward`.
    pub fn forward(&self, image: &ImagePatches) -> Result<Tensor> {
        let patches = image.patches().flatten_from(1)?;
        if patches.dim(1)? != self.patch_embed.in_dim() {
            return Err(Error::shape(
                "vit",
                format!(
                    "expected patches of {} values, found {:?}",
                    self.patch_embed.in_dim(),
                    image.patches().shape()
                ),
            ));
        }
        let table = self.rope.table(image.n_h(), image.n_w());
        let mut xs = self.patch_embed.forward(&patches)?;
        for block in &self.blocks {
            xs = block.forward(&xs, &table)?;
        }
        self.norm.forward(&xs)
    }
}
