//! The tower: a transformer over the patches of an image, each seeing all others.

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Error, Result, RmsNorm, VarBuilder};

use crate::{
    ImagePatches, VisionConfig,
    ops::{
        Linear, PatchRuns, Products, Rope2d, Rope2dTable, add, apply_rope_2d, full_attention,
        swiglu,
    },
};

/// The constant of the tower's norms. The text model's is another one.
const NORM_EPS: f32 = 1e-6;
/// Patches that pass together on a GPU, a larger picture by itself: enough to fill it, and a few hundred
/// megabytes of activations at the released widths.
const PASS_PATCHES: usize = 1 << 14;

/// Self-attention over all patches of an image.
#[derive(Debug, Clone)]
struct SelfAttention {
    wqkv: Linear,
    wo: Linear,
    heads: usize,
    head_dim: usize,
}

impl SelfAttention {
    fn new(cfg: &VisionConfig, vb: VarBuilder, products: &Products) -> Result<Self> {
        let dim = cfg.vision_dim;
        Ok(Self {
            wqkv: Linear::with(dim, 3 * dim, true, vb.pp("wqkv"), products)?,
            wo: Linear::with(dim, dim, true, vb.pp("wo"), products)?,
            heads: cfg.vision_n_heads,
            head_dim: cfg.head_dim(),
        })
    }

    /// `[n, dim]` → `[n, dim]`.
    fn forward(&self, xs: &Tensor, table: &Rope2dTable, runs: &PatchRuns) -> Result<Tensor> {
        let n = xs.dim(0)?;
        // Queries, keys and values stay in one tensor of three times the heads: the first two thirds
        // are rotated.
        let qkv = self
            .wqkv
            .forward(xs)?
            .reshape((n, 3 * self.heads, self.head_dim))?;
        let qkv = apply_rope_2d(&qkv, table, 2 * self.heads)?;
        let qkv = qkv.reshape((n, 3, self.heads, self.head_dim))?;
        self.wo.forward(&full_attention(&qkv, runs)?)
    }
}

/// The gated MLP; its two matrices have no bias.
#[derive(Debug, Clone)]
struct GatedMlp {
    w1: Linear,
    w2: Linear,
}

impl GatedMlp {
    fn new(cfg: &VisionConfig, vb: VarBuilder, products: &Products) -> Result<Self> {
        let (dim, inter) = (cfg.vision_dim, cfg.vision_inter_dim);
        Ok(Self {
            w1: Linear::with(dim, 2 * inter, false, vb.pp("w1"), products)?,
            w2: Linear::with(inter, dim, false, vb.pp("w2"), products)?,
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
        let products = Products::new(vb.device())?;
        Self::with(cfg, vb, &products)
    }

    fn with(cfg: &VisionConfig, vb: VarBuilder, products: &Products) -> Result<Self> {
        Ok(Self {
            norm1: RmsNorm::new(cfg.vision_dim, NORM_EPS, vb.pp("norm1"))?,
            attn: SelfAttention::new(cfg, vb.pp("attn"), products)?,
            norm2: RmsNorm::new(cfg.vision_dim, NORM_EPS, vb.pp("norm2"))?,
            mlp: GatedMlp::new(cfg, vb.pp("mlp"), products)?,
        })
    }

    /// `xs: [n, dim]` bf16, the patches of `runs` with the rotations of `table` → same shape.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, xs: &Tensor, table: &Rope2dTable, runs: &PatchRuns) -> Result<Tensor> {
        let attended = self.attn.forward(&self.norm1.forward(xs)?, table, runs)?;
        let xs = add(xs, &attended)?;
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
    device: Device,
}

impl Vit {
    /// Loads `patch_embed.proj`, `blocks.I` and `norm` under `vb`.
    ///
    /// # Errors
    /// The configuration is impossible, or a weight is missing or does not fit it.
    pub fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        let products = Products::new(vb.device())?;
        Self::with(cfg, vb, &products)
    }

    pub(crate) fn with(cfg: &VisionConfig, vb: VarBuilder, products: &Products) -> Result<Self> {
        cfg.validate()?;
        let (dim, embed) = (cfg.vision_dim, vb.pp("patch_embed").pp("proj"));
        Ok(Self {
            patch_embed: Linear::with(cfg.patch_dim(), dim, true, embed, products)?,
            blocks: (0..cfg.vision_n_layers)
                .map(|i| VisionBlock::with(cfg, vb.pp("blocks").pp(i), products))
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(dim, NORM_EPS, vb.pp("norm"))?,
            rope: Rope2d::new(cfg.head_dim(), cfg.vision_rope_theta)?,
            device: vb.device().clone(),
        })
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Features of every patch: `[n_h * n_w, vision_dim]` bf16, where the tower is.
    ///
    /// # Errors
    /// The patches are of another size than the tower's.
    ///
    /// Reference: `ViT.forward`.
    pub fn forward(&self, image: &ImagePatches) -> Result<Tensor> {
        self.pass(std::slice::from_ref(image))
    }

    /// [`forward`](Self::forward) of several images, in order. On a GPU pictures pass together; what one
    /// becomes does not depend on the others beyond the order of sums within a product.
    ///
    /// # Errors
    /// As for one.
    pub fn forward_all(&self, images: &[ImagePatches]) -> Result<Vec<Tensor>> {
        let patches = |image: &ImagePatches| image.n_h() * image.n_w();
        let room = match self.device {
            // There it would gain nothing: one picture is work enough for every thread.
            Device::Cpu => 0,
            _ => PASS_PATCHES,
        };
        let mut out = Vec::with_capacity(images.len());
        let mut rest = images;
        while !rest.is_empty() {
            let mut total = 0;
            let more = rest.iter().take_while(|image| {
                total += patches(image);
                total <= room
            });
            let (group, later) = rest.split_at(more.count().max(1));
            let features = self.pass(group)?;
            let mut at = 0;
            for image in group {
                out.push(features.narrow(0, at, patches(image))?);
                at += patches(image);
            }
            rest = later;
        }
        Ok(out)
    }

    /// One or more images end to end: `[patches of all, vision_dim]` bf16.
    fn pass(&self, images: &[ImagePatches]) -> Result<Tensor> {
        let flat = |image: &ImagePatches| -> Result<Tensor> {
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
            Ok(patches.to_device(&self.device)?)
        };
        let patches = images.iter().map(flat).collect::<Result<Vec<_>>>()?;
        let patches = match &patches[..] {
            [one] => one.clone(),
            several => Tensor::cat(several, 0)?,
        };
        let grids: Vec<_> = images.iter().map(|i| (i.n_h(), i.n_w())).collect();
        let lens: Vec<_> = grids.iter().map(|(h, w)| h * w).collect();
        let table = self.rope.tables(&grids).on(&self.device)?;
        let runs = PatchRuns::new(&lens, &self.device)?;
        let mut xs = self.patch_embed.forward(&patches)?;
        for block in &self.blocks {
            xs = block.forward(&xs, &table, &runs)?;
        }
        self.norm.forward(&xs)
    }
}
