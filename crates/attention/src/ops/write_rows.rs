//! Writing rows into a pool, in place.

use candle_core::{CpuStorage, DType, InplaceOp3, Layout, Tensor, WithDType};
use deepseek_v41_core::{Error, Result, cpu::contiguous};
use half::bf16;

const OP: &str = "write_rows";

/// `pool[slots[i]] = rows[i]` for every `i` with a slot; -1 skips the row.
///
/// `pool: [slots, D]`, `rows: [n, D]` of the same dtype (bf16, f32, or U8 for packed rows),
/// `slots: [n]` i32. Of rows with the same slot the last one stays. The pool must own its storage: a view of other tensors' data
/// changes with it.
///
/// # Errors
/// Shapes or dtypes that do not fit, a slot below -1 or past the pool: then nothing is written.
pub fn write_rows(pool: &Tensor, rows: &Tensor, slots: &Tensor) -> Result<()> {
    let fits = pool.rank() == 2
        && rows.rank() == 2
        && pool.dims()[1] == rows.dims()[1]
        && slots.dims() == [rows.dims()[0]];
    if !fits {
        return Err(Error::shape(
            OP,
            format!(
                "pool {:?}, rows {:?}, slots {:?}",
                pool.shape(),
                rows.shape(),
                slots.shape()
            ),
        ));
    }
    if pool.dtype() != rows.dtype()
        || !matches!(pool.dtype(), DType::BF16 | DType::F32 | DType::U8)
        || slots.dtype() != DType::I32
    {
        return Err(Error::shape(
            OP,
            format!(
                "pool {:?}, rows {:?}, slots {:?}",
                pool.dtype(),
                rows.dtype(),
                slots.dtype()
            ),
        ));
    }
    if rows.elem_count() == 0 {
        return Ok(());
    }
    if slots.device().is_cpu() {
        let (storage, layout) = slots.storage_and_layout();
        if let candle_core::Storage::Cpu(storage) = &*storage {
            check_slots(contiguous::<i32>(storage, layout, OP)?, pool.dims()[0])?;
        }
    }
    Ok(pool.inplace_op3(&rows.contiguous()?, slots, &WriteRows)?)
}

fn check_slots(slots: &[i32], capacity: usize) -> Result<()> {
    match slots
        .iter()
        .position(|&s| s < -1 || s >= 0 && s as usize >= capacity)
    {
        Some(i) => Err(Error::value(
            format!("{OP}: slot {i}"),
            format!("{} is neither -1 nor one of {capacity} rows", slots[i]),
        )),
        None => Ok(()),
    }
}

struct WriteRows;

impl InplaceOp3 for WriteRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        pool_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
        slots: &CpuStorage,
        slots_layout: &Layout,
    ) -> candle_core::Result<()> {
        let slots = contiguous::<i32>(slots, slots_layout, OP)?;
        let Some((start, end)) = pool_layout.contiguous_offsets() else {
            return Err(candle_core::Error::RequiresContiguous { op: OP }.bt());
        };
        let dim = pool_layout.dims()[1];
        match pool {
            CpuStorage::BF16(pool) => {
                let rows = contiguous::<bf16>(rows, rows_layout, OP)?;
                write_rows_ref(&mut pool[start..end], rows, slots, dim);
            }
            CpuStorage::U8(pool) => {
                let rows = contiguous::<u8>(rows, rows_layout, OP)?;
                write_rows_ref(&mut pool[start..end], rows, slots, dim);
            }
            CpuStorage::F32(pool) => {
                let rows = contiguous::<f32>(rows, rows_layout, OP)?;
                write_rows_ref(&mut pool[start..end], rows, slots, dim);
            }
            _ => candle_core::bail!("{OP}: the pool is neither bf16, f32 nor u8"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        pool: &mut candle_core::CudaStorage,
        pool_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
        slots: &candle_core::CudaStorage,
        slots_layout: &Layout,
    ) -> candle_core::Result<()> {
        crate::cuda::write_rows(pool, pool_layout, rows, rows_layout, slots, slots_layout)?;
        Ok(())
    }
}

/// [`write_rows`] over slices; slots other than -1 must be rows of the pool.
pub fn write_rows_ref<T: WithDType>(pool: &mut [T], rows: &[T], slots: &[i32], dim: usize) {
    for (row, &slot) in rows.chunks_exact(dim).zip(slots) {
        if slot >= 0 {
            pool[slot as usize * dim..][..dim].copy_from_slice(row);
        }
    }
}
