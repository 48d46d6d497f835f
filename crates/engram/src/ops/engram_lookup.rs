//! Table rows by number, dequantised on the way out: `bf16(e4m3 * e8m0)`.
//!
//! Exact wherever the product is a normal bf16: an e4m3 value has four significant bits.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use deepseek_v41_quant::formats::{e4m3, e8m0};
use half::bf16;
use rayon::prelude::*;

use crate::table::{EngramTable, SCALE_BLOCK};

const OP: &str = "engram_lookup";
/// Rows one parallel task reads.
const ROWS_PER_TASK: usize = 128;

/// `rows: [T, columns]` u32 row numbers on the CPU → `[T, columns * head_dim]` bf16.
///
/// # Errors
/// Another shape or dtype, or a row the table does not have.
pub fn engram_lookup(rows: &Tensor, table: &EngramTable) -> Result<Tensor> {
    if rows.dtype() != DType::U32 || rows.rank() != 2 {
        let (shape, dtype) = (rows.shape(), rows.dtype());
        return Err(Error::shape(
            OP,
            format!("rows: expected [T, columns] U32, found {shape:?} {dtype:?}"),
        ));
    }
    Ok(rows
        .contiguous()?
        .apply_op1_no_bwd(&EngramLookup { table })?)
}

struct EngramLookup<'a> {
    table: &'a EngramTable,
}

impl CustomOp1 for EngramLookup<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let rows = cpu::contiguous::<u32>(storage, layout, OP)?;
        let (tokens, columns) = layout.shape().dims2()?;
        let width = self.table.head_dim();
        let mut out = vec![bf16::ZERO; rows.len() * width];
        lookup_into(rows, self.table, &mut out)?;
        Ok((CpuStorage::BF16(out), (tokens, columns * width).into()))
    }
}

/// The definition: `out: [rows, head_dim]`. Every row number must be in the table.
pub fn engram_lookup_ref(rows: &[u32], table: &EngramTable, out: &mut [bf16]) {
    for (&row, out) in rows.iter().zip(out.chunks_exact_mut(table.head_dim())) {
        let (codes, scales) = table.row(row as usize);
        for i in 0..codes.len() {
            out[i] = bf16::from_f32(e4m3::decode(codes[i]) * e8m0::decode(scales[i / SCALE_BLOCK]));
        }
    }
}

/// Dequantises `rows` into `out: [rows, head_dim]`, bit for bit [`engram_lookup_ref`].
///
/// # Errors
/// A row the table does not have, or an `out` of another length.
pub fn lookup_into(rows: &[u32], table: &EngramTable, out: &mut [bf16]) -> Result<()> {
    let width = table.head_dim();
    if rows.len().checked_mul(width) != Some(out.len()) {
        return Err(Error::shape(
            OP,
            format!("{} rows of {width} into {}", rows.len(), out.len()),
        ));
    }
    table.check_rows(rows)?;
    if cpu::should_parallelise(out.len() * 4) {
        let out = out.par_chunks_mut(ROWS_PER_TASK * width);
        rows.par_chunks(ROWS_PER_TASK)
            .zip(out)
            .for_each(|(rows, out)| read_rows(rows, table, out));
    } else {
        read_rows(rows, table, out);
    }
    Ok(())
}

fn read_rows(rows: &[u32], table: &EngramTable, out: &mut [bf16]) {
    for (&row, out) in rows.iter().zip(out.chunks_exact_mut(table.head_dim())) {
        let (codes, scales) = table.row(row as usize);
        let blocks = codes
            .chunks_exact(SCALE_BLOCK)
            .zip(out.chunks_exact_mut(SCALE_BLOCK));
        for ((codes, out), &scale) in blocks.zip(scales) {
            decode_block(codes, e8m0::decode(scale), out);
        }
    }
}

/// One block without branches or tables, so that it compiles to vector code.
#[inline]
fn decode_block(codes: &[u8], scale: f32, out: &mut [bf16]) {
    for (&code, out) in codes.iter().zip(out) {
        let code = u32::from(code);
        let magnitude = code & 0x7f;
        // Normal codes: e4m3 has bias 7 and three mantissa bits, f32 bias 127 and twenty-three.
        let normal = (magnitude << 20) + (120 << 23);
        let subnormal = (magnitude as i32 as f32 * (1.0 / 512.0)).to_bits();
        let mut bits = if magnitude < 8 { subnormal } else { normal };
        bits = if magnitude == 0x7f { 0x7fc0_0000 } else { bits };
        let value = f32::from_bits(bits | (code & 0x80) << 24) * scale;
        *out = round(value);
    }
}

/// f32 → bf16, ties to even; `bf16::from_f32` in a form that vectorises.
#[inline]
pub(crate) fn round(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}
