//! Table rows by number, dequantised on the way out: `bf16(e4m3 * e8m0)`.
//!
//! Exact wherever the product is a normal bf16: an e4m3 value has four significant bits.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, Isa},
};
use deepseek_v41_quant::formats::{e4m3, e8m0};
use half::bf16;
use rayon::prelude::*;

use super::dispatch::dispatch;
use crate::table::{EngramTable, SCALE_BLOCK};

const OP: &str = "engram_lookup";
/// Rows one parallel task reads.
const ROWS_PER_TASK: usize = 128;
/// Rows asked for before they are decoded.
const ROWS_AHEAD: usize = 6;

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
            out[i] =
                cpu::round_bf16(e4m3::decode(codes[i]) * e8m0::decode(scales[i / SCALE_BLOCK]));
        }
    }
}

/// Dequantises `rows` into `out: [rows, head_dim]`: the values of [`engram_lookup_ref`], bit for bit.
///
/// # Errors
/// A row the table does not have, or an `out` of another length.
pub fn lookup_into(rows: &[u32], table: &EngramTable, out: &mut [bf16]) -> Result<()> {
    lookup_with(Isa::detect(), rows, table, out)
}

/// [`lookup_into`] with the instructions of `isa`.
///
/// # Errors
/// As [`lookup_into`].
pub fn lookup_with(isa: Isa, rows: &[u32], table: &EngramTable, out: &mut [bf16]) -> Result<()> {
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
        let tasks = rows.par_chunks(ROWS_PER_TASK).zip(out);
        tasks.for_each(|(rows, out)| read_rows(isa, rows, table, out));
    } else {
        read_rows(isa, rows, table, out);
    }
    Ok(())
}

dispatch! {
    fn read_rows(rows: &[u32], table: &EngramTable, out: &mut [bf16]) = read_rows_body
}

#[inline(always)]
fn read_rows_body(rows: &[u32], table: &EngramTable, out: &mut [bf16]) {
    for &row in rows.iter().take(ROWS_AHEAD) {
        prefetch(row, table);
    }
    for (i, out) in out.chunks_exact_mut(table.head_dim()).enumerate() {
        if let Some(&row) = rows.get(i + ROWS_AHEAD) {
            prefetch(row, table);
        }
        let (codes, scales) = table.row(rows[i] as usize);
        let (codes, _) = codes.as_chunks::<SCALE_BLOCK>();
        let (out, _) = out.as_chunks_mut::<SCALE_BLOCK>();
        for ((codes, out), &scale) in codes.iter().zip(out).zip(scales) {
            decode_block(codes, e8m0::decode(scale), out);
        }
    }
}

/// One block without branches or tables, so that it compiles to vector code.
#[inline(always)]
fn decode_block(codes: &[u8; SCALE_BLOCK], scale: f32, out: &mut [bf16; SCALE_BLOCK]) {
    for i in 0..SCALE_BLOCK {
        let code = u32::from(codes[i]);
        let magnitude = code & 0x7f;
        // Normal codes: e4m3 has bias 7 and three mantissa bits, f32 bias 127 and twenty-three.
        let normal = (magnitude << 20) + (120 << 23);
        let subnormal = (magnitude as i32 as f32 * e4m3::MIN_POSITIVE).to_bits();
        let bits = if magnitude < 8 { subnormal } else { normal };
        let bits = if magnitude == 0x7f {
            f32::NAN.to_bits()
        } else {
            bits
        };
        let value = f32::from_bits(bits | (code & 0x80) << 24);
        out[i] = cpu::round_bf16(value * scale);
    }
}

/// Asks for a row's cache lines. Rows lie anywhere in a table far larger than any cache, and decoding
/// one takes about as long as waiting for the next.
#[inline(always)]
#[allow(unsafe_code)]
fn prefetch(row: u32, table: &EngramTable) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let (codes, scales) = table.row(row as usize);
        for line in codes.chunks(64).chain([scales]) {
            // SAFETY: every x86-64 processor has SSE, and a prefetch accesses nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, table);
}
