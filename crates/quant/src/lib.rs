#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod formats;
mod grouped;
mod linear;
mod load;
pub mod ops;
mod parallel;
#[cfg(feature = "cuda")]
pub mod shared_input;
mod weight;

pub use formats::{e2m1, e4m3, e8m0};
pub use grouped::GroupedLinear;
pub use linear::{Linear, WeightFormat, WideRows};
pub use ops::{
    act_quant::{
        ActScale, FP8_GROUP, QuantizedActivation, act_quant, act_quant_slice, act_quant_values,
        act_quant_with,
    },
    dequant::{dequant, dequant_bf16, dequant_fp8_slice},
    fake_quant::{
        fake_quant_fp4, fake_quant_fp4_slice, fake_quant_fp8, fake_quant_fp8_slice,
        fake_quant_fp8_with,
    },
    fp4_act_quant::{QuantizedFp4, ScaleFormat, fp4_act_quant, fp4_act_quant_slice},
    fp4_gemm::fp4_gemm,
    fp8_gemm::fp8_gemm,
};
pub use parallel::{ColumnParallelLinear, RowParallelLinear};
pub use weight::{FP4_GROUP, FP8_TILE, Fp4Weight, Fp8Weight};
