//! What a GPU refuses is told apart, and leaves it and the CPU usable.

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, Error, LoadOptions, Result,
    core::{
        DeviceError,
        cuda::{
            Launch, Out,
            kernels::{self, Module},
        },
        open_device,
    },
    model::{ForwardBatch, Limits, ModelState},
};

use crate::{correctness::Report, data::values};

/// More than any card has.
const TOO_MUCH: usize = 1 << 40;

/// Text that is no program.
const GARBAGE: Module = Module {
    name: "garbage",
    image: b"this is not a kernel\0\0\0\0",
};

fn reason<T>(result: Result<T>) -> Option<DeviceError> {
    match result {
        Err(Error::Device { reason, .. }) => Some(reason),
        _ => None,
    }
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
pub(crate) fn errors(gpu: &Device, r: &mut Report) -> Result<()> {
    let Device::Cuda(dev) = gpu else {
        return Err(Error::shape("errors", "not on the GPU"));
    };
    let models = [Device::Cpu, gpu.clone()].map(|device| {
        DeepSeekV41::tiny_with(&LoadOptions {
            device,
            ..LoadOptions::default()
        })
    });
    let [cpu, cuda] = models;
    let models = [cpu?, cuda?];
    let before = [step(&models[0])?, step(&models[1])?];

    // SAFETY: neither kernel exists, so nothing is launched.
    let launched =
        |module, name| unsafe { Launch::new(dev, module, name).launch((1, 1, 1), 32, 0) };
    type Is = fn(&DeviceError) -> bool;
    let full: Is = |e| matches!(e, DeviceError::OutOfMemory(_));
    let refused: Is = |e| matches!(e, DeviceError::Refused(_));
    let cases: [(&str, Option<DeviceError>, Is); 5] = [
        ("GPU 99", reason(open_device("cuda:99")), |e| {
            matches!(e, DeviceError::NoGpu(_))
        }),
        ("1 TB, ours", reason(Out::<u8>::new(dev, TOO_MUCH)), full),
        (
            "1 TB, candle's",
            reason(Tensor::zeros(TOO_MUCH, DType::U8, gpu).map_err(Error::from)),
            full,
        ),
        (
            "a module of garbage",
            reason(launched(GARBAGE, "none")),
            refused,
        ),
        (
            "a kernel that is not there",
            reason(launched(kernels::RMS_NORM, "no_such_kernel")),
            refused,
        ),
    ];
    for (what, reason, expected) in cases {
        if let Some(reason) = &reason {
            println!("       {what}: {reason}");
        }
        r.holds(
            "error told apart",
            what,
            reason.as_ref().is_some_and(expected),
        );
    }
    for (model, (name, before)) in models.iter().zip(["CPU", "GPU"].iter().zip(before)) {
        r.holds("a step after the errors", name, step(model)? == before);
    }
    Ok(())
}

/// Logits of one step of a fresh sequence.
fn step(model: &DeepSeekV41) -> Result<Vec<f64>> {
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 64,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    let seq = state.create()?;
    let batch = ForwardBatch::one(seq, vec![3_u32, 50, 70, 11, 900]);
    values(&transformer.forward(&batch, &mut state)?.logits)
}
