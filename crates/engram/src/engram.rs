//! One Engram layer.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result, VarBuilder};
use deepseek_v41_quant::Linear;

use crate::{
    config::EngramConfig,
    ops::{engram_gate::engram_gate, engram_lookup::engram_lookup},
    table::EngramTable,
};
#[cfg(feature = "cuda")]
use crate::{
    cuda::{DeviceTable, TablePlacement},
    ops::engram_gate::check as check_gate,
};

/// Writes an n-gram lookup into the residual stream, gated by how well it matches that stream.
///
/// The two halves are separate so that the rows of a later layer can be fetched while earlier layers
/// run: [`Engram::gather`] needs only hashes, [`Engram::forward`] needs the stream.
///
/// Reference: `Engram`.
#[derive(Debug, Clone)]
pub struct Engram {
    table: EngramTable,
    wkv: Linear,
    /// `q_weight * k_weight`, `[C, dim]` f32: they are only ever used as a product.
    weight: Tensor,
    columns: usize,
    eps: f32,
    #[cfg(feature = "cuda")]
    device: Option<OnDevice>,
}

/// What a GPU has of a layer beside its projection.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
struct OnDevice {
    /// `None` where the host reads the rows.
    table: Option<DeviceTable>,
    q_weight: Tensor,
    k_weight: Tensor,
}

#[cfg(feature = "cuda")]
impl OnDevice {
    fn new(table: &EngramTable, q: &Tensor, k: &Tensor, vb: &VarBuilder) -> Result<Option<Self>> {
        use deepseek_v41_core::cuda::bf16_weight;
        if !q.device().is_cuda() {
            return Ok(None);
        }
        Ok(Some(Self {
            table: DeviceTable::new(table, q.device(), TablePlacement::default())?,
            q_weight: bf16_weight(q, &vb.full_name("q_weight"))?,
            k_weight: bf16_weight(k, &vb.full_name("k_weight"))?,
        }))
    }
}

impl Engram {
    /// Loads `embed.{weight, scale}`, `wkv.*`, `q_weight` and `k_weight` under `vb`.
    ///
    /// `layer` counts Engram layers: an index into `cfg.layer_ids`.
    ///
    /// # Errors
    /// No such layer, or weights that are missing or not as the config says.
    pub fn new(cfg: &EngramConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let Some(&rows) = cfg.num_embeddings.get(layer) else {
            return Err(Error::config(
                "engram_num_embeddings",
                format!("no entry for engram layer {layer}"),
            ));
        };
        let columns = cfg.columns();
        let sizes = columns.checked_mul(cfg.head_dim).zip(
            cfg.hc_mult
                .checked_add(1)
                .and_then(|c| c.checked_mul(cfg.dim)),
        );
        let Some((width, out_dim)) = sizes else {
            return Err(Error::config(
                "engram_head_dim",
                "the layer's width overflows",
            ));
        };
        let table = EngramTable::new(rows, cfg.head_dim, vb.pp("embed"))?;
        let wkv = Linear::new(width, out_dim, cfg.linear_format, vb.pp("wkv"))?;
        let shape = [cfg.hc_mult, cfg.dim];
        let (q, k) = (
            vb.tensor_f32("q_weight", &shape)?,
            vb.tensor_f32("k_weight", &shape)?,
        );
        let weight = (&q * &k)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            device: OnDevice::new(&table, &q, &k, &vb)?,
            table,
            wkv,
            weight,
            columns,
            eps: cfg.norm_eps,
        })
    }

    /// Moves the table to where `placement` says; on the CPU there is one place.
    ///
    /// # Errors
    /// The device's memory is full, or the system does not pin the table's.
    #[cfg(feature = "cuda")]
    pub fn place_table(&mut self, placement: TablePlacement) -> Result<()> {
        if let Some(own) = &mut self.device {
            own.table = None;
            own.table = DeviceTable::new(&self.table, own.q_weight.device(), placement)?;
        }
        Ok(())
    }

    /// The layer's table.
    pub fn table(&self) -> &EngramTable {
        &self.table
    }

    /// What a step takes to the layer's device, made of `hashes: [T, columns]` u32 on the CPU: the hashes
    /// themselves where a GPU has a copy of the table, on it the rows where it has none.
    ///
    /// # Errors
    /// As [`Engram::gather`].
    pub fn host_input(&self, hashes: &Tensor) -> Result<Tensor> {
        self.check_hashes(hashes)?;
        #[cfg(feature = "cuda")]
        if self.device.as_ref().is_some_and(|own| own.table.is_none()) {
            return engram_lookup(hashes, &self.table);
        }
        Ok(hashes.clone())
    }

    /// Table rows `[T, columns * head_dim]` bf16 of an [`Engram::host_input`] that is now on the layer's
    /// device.
    ///
    /// # Errors
    /// As [`Engram::gather`].
    pub fn rows(&self, input: &Tensor) -> Result<Tensor> {
        match input.dtype() {
            DType::BF16 => Ok(input.clone()),
            _ => self.gather(input),
        }
    }

    /// Fetches table rows: `hashes: [T, columns]` u32 → `[T, columns * head_dim]` bf16, on the device of
    /// the weights. The table stays in host memory, and only the rows asked for are read; a GPU holds a
    /// copy of a table that fits it.
    ///
    /// # Errors
    /// Another shape, or a hash outside the table (hashes of another layout).
    pub fn gather(&self, hashes: &Tensor) -> Result<Tensor> {
        self.check_hashes(hashes)?;
        #[cfg(feature = "cuda")]
        if let Some(OnDevice {
            table: Some(table), ..
        }) = &self.device
        {
            return table.lookup(&hashes.to_device(self.weight.device())?);
        }
        let rows = engram_lookup(&hashes.to_device(&Device::Cpu)?, &self.table)?;
        Ok(rows.to_device(self.weight.device())?)
    }

    fn check_hashes(&self, hashes: &Tensor) -> Result<()> {
        match hashes.rank() == 2 && hashes.dim(1)? == self.columns {
            true => Ok(()),
            false => Err(Error::shape(
                "engram gather",
                format!("expected [T, {}], found {:?}", self.columns, hashes.shape()),
            )),
        }
    }

    /// `stream: [T, C, dim]` bf16 and the `rows` of its tokens → the stream with the lookup added.
    ///
    /// `image_mask: [T]` u8 is 1 inside an image span; those tokens pass through untouched. `rows` may be
    /// fewer than the stream's tokens (sequence-parallel padding): the rest pass through as well.
    ///
    /// # Errors
    /// Shapes or dtypes that do not fit.
    pub fn forward(
        &self,
        stream: &Tensor,
        rows: &Tensor,
        image_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let kv = self.wkv.forward(rows)?;
        #[cfg(feature = "cuda")]
        if let Some(own) = &self.device {
            check_gate(stream, &kv, &self.weight, image_mask)?;
            let weights = (&own.q_weight, &own.k_weight);
            return crate::cuda::engram_gate(stream, &kv, weights, image_mask, self.eps);
        }
        engram_gate(stream, &kv, &self.weight, image_mask, self.eps)
    }
}
