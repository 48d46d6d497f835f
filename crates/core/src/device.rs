//! Opening a device by name.

use candle_core::Device;

use crate::{Error, Result};

/// `cpu`, `cuda` or `cuda:1`.
///
/// A CUDA device opened here works on a stream of its own, on which every operation of this workspace
/// is ordered.
///
/// # Errors
/// [`Error::Unsupported`] for another name, or a CUDA device in a build without the feature `cuda`;
/// [`Error::Device`] when there is no such GPU, its driver is too old, or it is older than sm_80
/// ([`DeviceError`](crate::DeviceError) tells them apart). Each says what to do; the CPU works regardless.
pub fn open_device(name: &str) -> Result<Device> {
    let cuda = match name.split_once(':') {
        _ if name == "cpu" => return Ok(Device::Cpu),
        _ if name == "cuda" => Some(0),
        Some(("cuda", ordinal)) => ordinal.parse::<usize>().ok(),
        _ => None,
    };
    match cuda {
        Some(ordinal) => open_cuda(ordinal),
        None => Err(Error::Unsupported {
            what: format!("device `{name}`: expected cpu, cuda or cuda:N"),
        }),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: usize) -> Result<Device> {
    crate::cuda::open(ordinal)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: usize) -> Result<Device> {
    Err(Error::Unsupported {
        what: "device `cuda` in a build without kernels: build with `--features cuda`".to_owned(),
    })
}

/// A tensor from host values on any device, without elements too.
///
/// A CUDA allocation cannot be empty, so an empty tensor there is a view of one element.
///
/// # Errors
/// The device refuses the allocation.
pub fn upload<T: candle_core::WithDType>(
    values: Vec<T>,
    shape: impl Into<candle_core::Shape>,
    device: &Device,
) -> Result<candle_core::Tensor> {
    let shape = shape.into();
    if shape.elem_count() == 0 && !device.is_cpu() {
        let one = candle_core::Tensor::zeros(1, T::DTYPE, device)?;
        return Ok(one.narrow(0, 0, 0)?.reshape(shape)?);
    }
    Ok(candle_core::Tensor::from_vec(values, shape, device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert!(open_device("cpu").is_ok_and(|d| d.is_cpu()));
        for name in ["", "gpu", "cuda:", "cuda:x", "cpu:0"] {
            assert!(
                matches!(open_device(name), Err(Error::Unsupported { .. })),
                "{name}"
            );
        }
        // On a machine with a GPU this opens it; everywhere else it is an error with a reason.
        if let Err(err) = open_device("cuda:99") {
            assert!(
                matches!(err, Error::Unsupported { .. } | Error::Device { .. }),
                "{err}"
            );
        }
    }

    #[test]
    fn empty_tensors_have_their_shape() {
        let empty = upload(Vec::<i32>::new(), (3, 0), &Device::Cpu).expect("no allocation");
        assert_eq!(empty.dims(), [3, 0]);
    }
}
