//! Cached rows as codes and scales: the bytes their rounding left them with.
//!
//! Rows reach a cache already rounded to fp8 or fp4 and back, so every group of one is a small set of
//! codes times one scale. Storing those instead of bf16 changes no value:
//!
//! ```text
//! window       D e4m3 codes         | D/32 e8m0 scales     528 B at D = 512 (1024 as bf16)
//! compressed   D/2 pairs of e2m1    | D/16 e4m3 scales     288 B at D = 512 (1024)
//! index key    D/2 pairs of e2m1    | D/32 e8m0 scales      68 B at D = 128 (256)
//! ```

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu, upload};
use deepseek_v41_quant::{e2m1, e4m3, e8m0};
use half::bf16;
use rayon::prelude::*;

use crate::rows::RowQuant;

/// Columns that [`RowCodec::decode_cols`] takes at a time; groups are made of whole ones.
pub(crate) const COLS: usize = 16;

/// The packed form of rows of `dim` values rounded by `quant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCodec {
    quant: RowQuant,
    dim: usize,
}

impl RowCodec {
    /// # Errors
    /// [`Error::Shape`] if `dim` is not made of whole groups.
    pub fn new(quant: RowQuant, dim: usize) -> Result<Self> {
        if dim == 0 || !dim.is_multiple_of(quant.group()) {
            let group = quant.group();
            return Err(Error::shape(
                "pack",
                format!("rows of {dim} in groups of {group}"),
            ));
        }
        Ok(Self { quant, dim })
    }

    /// The codec of stored rows of `bytes` that hold `dim` values: the three forms differ in width.
    pub(crate) fn of_width(bytes: usize, dim: usize) -> Option<Self> {
        [RowQuant::Window, RowQuant::Compressed, RowQuant::Index]
            .into_iter()
            .filter_map(|quant| Self::new(quant, dim).ok())
            .find(|codec| codec.row_bytes() == bytes)
    }

    /// Values of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.code_bytes() + self.scale_bytes()
    }

    /// The number format.
    pub fn quant(&self) -> RowQuant {
        self.quant
    }

    pub(crate) fn code_bytes(&self) -> usize {
        match self.quant {
            RowQuant::Window => self.dim,
            RowQuant::Compressed | RowQuant::Index => self.dim / 2,
        }
    }

    pub(crate) fn scale_bytes(&self) -> usize {
        self.dim / self.quant.group()
    }

    /// Packs one row. `row: [dim]`, `out: [row_bytes]`. A group with a NaN becomes all NaN, as rounding
    /// makes it.
    ///
    /// # Errors
    /// [`Error::Value`] for a row that was not rounded by this format: it would come back changed.
    pub fn encode(&self, row: &[bf16], out: &mut [u8]) -> Result<()> {
        let group = self.quant.group();
        let (codes, scales) = out.split_at_mut(self.code_bytes());
        let width = self.code_bytes() / (self.dim / group);
        for ((xs, codes), scale) in row
            .chunks_exact(group)
            .zip(codes.chunks_exact_mut(width))
            .zip(scales)
        {
            *scale = self.encode_group(xs, codes).ok_or_else(|| {
                Error::value(
                    "packed row",
                    format!("{:?} has no exact {:?} form", xs, self.quant),
                )
            })?;
        }
        Ok(())
    }

    /// Writes a group's codes and returns its scale byte.
    fn encode_group(&self, xs: &[bf16], codes: &mut [u8]) -> Option<u8> {
        let top = xs.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        if xs.iter().any(|x| x.is_nan()) {
            codes.fill(0);
            return Some(self.nan_scale());
        }
        self.scales(top).into_iter().flatten().find(|&byte| {
            let scale = self.scale(byte);
            let exact = |x: &bf16| {
                let (code, value) = self.code(x.to_f32() / scale);
                (value * scale == x.to_f32()).then_some(code)
            };
            match self.quant {
                RowQuant::Window => xs
                    .iter()
                    .zip(codes.iter_mut())
                    .all(|(x, out)| exact(x).map(|code| *out = code).is_some()),
                RowQuant::Compressed | RowQuant::Index => xs
                    .chunks_exact(2)
                    .zip(codes.iter_mut())
                    .all(|(pair, out)| match (exact(&pair[0]), exact(&pair[1])) {
                        (Some(low), Some(high)) => {
                            *out = e2m1::pack(low, high);
                            true
                        }
                        _ => false,
                    }),
            }
        })
    }

    /// Scale bytes that may hold a group whose largest magnitude is `top`, the likeliest first.
    fn scales(&self, top: f32) -> [Option<u8>; 7] {
        let mut out = [None; 7];
        match self.quant {
            // The smallest power of two under which `top` does not overflow: what is exact under a
            // larger one is exact under it.
            RowQuant::Window => out[0] = Some(power_of_two(top, e4m3::MAX)),
            RowQuant::Index => out[0] = Some(power_of_two(top, e2m1::MAX)),
            // `top` is some code times the scale. Six nearly always, since that is how the scale was
            // chosen; among the smallest scales, which are coarse, it may be another.
            RowQuant::Compressed if top == 0.0 => out[0] = Some(1),
            RowQuant::Compressed => {
                for (out, code) in out.iter_mut().zip((1..8).rev()) {
                    let scale = top / e2m1::decode(code);
                    let byte = e4m3::encode(scale);
                    *out = (scale > 0.0 && e4m3::decode(byte) == scale).then_some(byte);
                }
            }
        }
        out
    }

    fn nan_scale(&self) -> u8 {
        match self.quant {
            RowQuant::Window | RowQuant::Index => e8m0::NAN,
            RowQuant::Compressed => e4m3::NAN,
        }
    }

    fn scale(&self, byte: u8) -> f32 {
        match self.quant {
            RowQuant::Window | RowQuant::Index => e8m0::decode(byte),
            RowQuant::Compressed => e4m3::decode(byte),
        }
    }

    fn code(&self, x: f32) -> (u8, f32) {
        match self.quant {
            RowQuant::Window => {
                let code = e4m3::encode(x);
                (code, e4m3::decode(code))
            }
            RowQuant::Compressed | RowQuant::Index => {
                let code = e2m1::encode(x);
                (code, e2m1::decode(code))
            }
        }
    }

    /// Unpacks one row. `bytes: [row_bytes]`, `out: [dim]`.
    pub fn decode(&self, bytes: &[u8], out: &mut [bf16]) {
        for (i, out) in out.chunks_exact_mut(COLS).enumerate() {
            let values = self.decode_cols(bytes, i * COLS);
            for (out, value) in out.iter_mut().zip(values) {
                *out = bf16::from_f32(value);
            }
        }
    }

    /// Columns `first .. first + 16` of a row in f32, exactly the stored bf16 values; `first` is a
    /// multiple of 16.
    #[inline(always)]
    pub(crate) fn decode_cols(&self, bytes: &[u8], first: usize) -> [f32; COLS] {
        let scale = self.scale(bytes[self.code_bytes() + first / self.quant.group()]);
        let mut out = [0.0; COLS];
        match self.quant {
            RowQuant::Window => {
                for (out, &code) in out.iter_mut().zip(&bytes[first..first + COLS]) {
                    *out = e4m3_value(code) * scale;
                }
            }
            RowQuant::Compressed | RowQuant::Index => {
                let pairs = &bytes[first / 2..(first + COLS) / 2];
                for (out, &pair) in out.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
                    out[0] = e2m1_value(pair & 15) * scale;
                    out[1] = e2m1_value(pair >> 4) * scale;
                }
            }
        }
        out
    }

    /// Refuses bytes that [`encode`](Self::encode) never writes, as a damaged file may hold.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<()> {
        let nan = |code: &u8| code & 0x7f == e4m3::NAN;
        let bad = self.quant == RowQuant::Window
            && bytes
                .chunks_exact(self.row_bytes())
                .any(|row| row[..self.dim].iter().any(nan));
        match bad {
            false => Ok(()),
            true => Err(Error::value("packed row", "a code that is not a number")),
        }
    }
}

/// A finite e4m3 code's value without a table, so that 16 of them fill a vector: its bits in the place
/// of an f32's.
#[inline(always)]
fn e4m3_value(code: u8) -> f32 {
    let code = u32::from(code);
    let x = f32::from_bits(((code & 0x7f) << 20) + ((127 - 7) << 23));
    // Without the implicit one of exponent 0: 2^-6 * fraction.
    let x = if code & 0x78 == 0 {
        2.0 * x - 0.015625
    } else {
        x
    };
    f32::from_bits(x.to_bits() | (code & 0x80) << 24)
}

/// As [`e4m3_value`], for e2m1.
#[inline(always)]
fn e2m1_value(code: u8) -> f32 {
    let code = u32::from(code);
    let x = f32::from_bits(((code & 7) << 22) + ((127 - 1) << 23));
    let x = if code & 6 == 0 { 2.0 * x - 1.0 } else { x };
    f32::from_bits(x.to_bits() | (code & 8) << 28)
}

/// The e8m0 byte of the smallest power of two `s` with `top <= limit * s`.
fn power_of_two(top: f32, limit: f32) -> u8 {
    let exponent = |x: f32| (x.to_bits() >> 23) as i32;
    // Too small by at most one step, whatever the fractions.
    let guess = exponent(top) - exponent(limit) + 127;
    let fits = |byte: &i32| f64::from(limit) * 2f64.powi(byte - 127) >= f64::from(top);
    (guess.max(1)..255).find(fits).unwrap_or(254) as u8
}

/// `rows: [n, dim]` bf16, rounded by the codec's format → `[n, row_bytes]` U8.
///
/// # Errors
/// Another width or dtype, or a row that was not rounded.
pub fn pack_rows(rows: &Tensor, codec: RowCodec) -> Result<Tensor> {
    let (_, dim) = rows.dims2()?;
    if dim != codec.dim || rows.dtype() != DType::BF16 {
        return Err(Error::shape(
            "pack_rows",
            format!(
                "expected [n, {}] bf16, found {:?} {:?}",
                codec.dim,
                rows.shape(),
                rows.dtype()
            ),
        ));
    }
    on_host(rows, codec.row_bytes(), &Pack(codec))
}

/// The opposite of [`pack_rows`]: `[n, row_bytes]` U8 → `[n, dim]` bf16.
///
/// # Errors
/// Another width or dtype.
pub fn unpack_rows(rows: &Tensor, codec: RowCodec) -> Result<Tensor> {
    let (_, bytes) = rows.dims2()?;
    if bytes != codec.row_bytes() || rows.dtype() != DType::U8 {
        return Err(Error::shape(
            "unpack_rows",
            format!(
                "expected [n, {}] U8, found {:?} {:?}",
                codec.row_bytes(),
                rows.shape(),
                rows.dtype()
            ),
        ));
    }
    on_host(rows, codec.dim, &Unpack(codec))
}

/// Rows go in and out of a GPU in packed form only when a sequence is saved or brought back: they pass
/// through the host.
fn on_host(rows: &Tensor, width: usize, op: &impl CustomOp1) -> Result<Tensor> {
    if rows.device().is_cpu() {
        return Ok(rows.contiguous()?.apply_op1_no_bwd(op)?);
    }
    let device = rows.device();
    if rows.elem_count() == 0 {
        return match rows.dtype() {
            DType::U8 => upload(Vec::<bf16>::new(), (0, width), device),
            _ => upload(Vec::<u8>::new(), (0, width), device),
        };
    }
    let rows = rows.to_device(&Device::Cpu)?.contiguous()?;
    Ok(rows.apply_op1_no_bwd(op)?.to_device(device)?)
}

struct Pack(RowCodec);

impl CustomOp1 for Pack {
    fn name(&self) -> &'static str {
        "pack_rows"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let rows = cpu::contiguous::<bf16>(s, l, self.name())?;
        let (n, bytes) = (l.dims()[0], self.0.row_bytes());
        let mut out = vec![0u8; n * bytes];
        let row = |(out, row): (&mut [u8], &[bf16])| self.0.encode(row, out);
        let pairs = out
            .chunks_exact_mut(bytes)
            .zip(rows.chunks_exact(self.0.dim));
        if cpu::should_parallelise(rows.len() * 16) {
            let pairs: Vec<_> = pairs.collect();
            pairs.into_par_iter().try_for_each(row)?;
        } else {
            { pairs }.try_for_each(row)?;
        }
        Ok((CpuStorage::U8(out), Shape::from((n, bytes))))
    }
}

struct Unpack(RowCodec);

impl CustomOp1 for Unpack {
    fn name(&self) -> &'static str {
        "unpack_rows"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let bytes = cpu::contiguous::<u8>(s, l, self.name())?;
        let (n, dim) = (l.dims()[0], self.0.dim);
        let mut out = vec![bf16::ZERO; n * dim];
        let rows = out
            .chunks_exact_mut(dim)
            .zip(bytes.chunks_exact(self.0.row_bytes()));
        rows.for_each(|(out, row)| self.0.decode(row, out));
        Ok((CpuStorage::BF16(out), Shape::from((n, dim))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_tables_are_those_of_the_tables() {
        for code in 0..=255u8 {
            if code & 0x7f != e4m3::NAN {
                assert_eq!(
                    e4m3_value(code).to_bits(),
                    e4m3::decode(code).to_bits(),
                    "{code:#x}"
                );
            }
            let code = code & 15;
            assert_eq!(
                e2m1_value(code).to_bits(),
                e2m1::decode(code).to_bits(),
                "{code:#x}"
            );
        }
    }
}
