//! Why a GPU cannot be used, told apart from what the driver says.

use crate::Error;

/// Why a GPU cannot be used, or an operation on it failed. Each says what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The machine has no GPU of that number, or no driver.
    #[error(
        "{0}; there is no such GPU: `nvidia-smi` should list it. Without one use the device `cpu`"
    )]
    NoGpu(String),
    /// The driver is older than the build, or its parts do not fit each other.
    #[error(
        "{0}; the build needs a driver for CUDA 13 (580 or later): update it, or use the device `cpu`"
    )]
    Driver(String),
    /// There are no kernels for a card this old.
    #[error(
        "compute capability {}.{} is older than 8.0, for which there are no kernels: use the device `cpu`",
        .0.0, .0.1
    )]
    TooOld((i32, i32)),
    /// An allocation failed. What was there before is unharmed.
    #[error(
        "{0}; no memory is left: lower max_len, max_seqs or the chunk length, or use another GPU"
    )]
    OutOfMemory(String),
    /// The driver does not take a kernel: damaged code, code for another card, or more resources than it has.
    #[error(
        "{0}; the driver refuses the kernel: it must be built for this card (CUDA_COMPUTE_CAP) and the \
         driver be 580 or later"
    )]
    Refused(String),
    /// A kernel failed. Everything that this process holds on the GPU is lost, and it cannot be opened again.
    #[error("{0}; a kernel failed, and this process cannot use the GPU any more: start it anew")]
    Lost(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl DeviceError {
    /// Sorts what the driver, cuBLAS or candle says by the error names in it.
    pub fn from_text(says: &str) -> Self {
        let name = |start: &str| {
            let at = says.find(start)?;
            let rest = &says[at..];
            let end =
                rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
            Some(&rest[..end.unwrap_or(rest.len())])
        };
        let text = says.to_owned();
        match name("CUDA_ERROR_")
            .or_else(|| name("CUBLAS_STATUS_"))
            .unwrap_or_default()
        {
            "CUDA_ERROR_NO_DEVICE" | "CUDA_ERROR_INVALID_DEVICE" | "CUDA_ERROR_STUB_LIBRARY" => {
                Self::NoGpu(text)
            }
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
            | "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"
            | "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" => Self::Driver(text),
            "CUDA_ERROR_OUT_OF_MEMORY" | "CUBLAS_STATUS_ALLOC_FAILED" => Self::OutOfMemory(text),
            "CUDA_ERROR_INVALID_IMAGE"
            | "CUDA_ERROR_NO_BINARY_FOR_GPU"
            | "CUDA_ERROR_INVALID_PTX"
            | "CUDA_ERROR_INVALID_SOURCE"
            | "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"
            | "CUDA_ERROR_JIT_COMPILATION_DISABLED"
            | "CUDA_ERROR_NOT_FOUND"
            | "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
            | "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE" => Self::Refused(text),
            "CUDA_ERROR_ILLEGAL_ADDRESS"
            | "CUDA_ERROR_ILLEGAL_INSTRUCTION"
            | "CUDA_ERROR_MISALIGNED_ADDRESS"
            | "CUDA_ERROR_INVALID_ADDRESS_SPACE"
            | "CUDA_ERROR_INVALID_PC"
            | "CUDA_ERROR_HARDWARE_STACK_ERROR"
            | "CUDA_ERROR_ASSERT"
            | "CUDA_ERROR_LAUNCH_FAILED"
            | "CUDA_ERROR_LAUNCH_TIMEOUT"
            | "CUDA_ERROR_ECC_UNCORRECTABLE"
            | "CUDA_ERROR_CONTEXT_IS_DESTROYED"
            | "CUDA_ERROR_UNKNOWN" => Self::Lost(text),
            _ => Self::Other(text),
        }
    }

    /// The failure of a GPU behind an error of candle's, if that is what it is, and where it happened: candle
    /// allocates and launches too, and errors of our operations pass through it.
    pub(crate) fn behind(err: &candle_core::Error) -> Option<(String, Self)> {
        use candle_core::Error as E;
        match err {
            E::WithBacktrace { inner, .. }
            | E::Context { inner, .. }
            | E::WithPath { inner, .. } => Self::behind(inner),
            E::Cuda(err) => match err.downcast_ref() {
                Some(Error::Device { what, reason }) => Some((what.clone(), reason.clone())),
                _ => Self::of_candle(&err.to_string()),
            },
            // What waiting for the device fails with.
            E::Wrapped(err) => Self::of_candle(&err.to_string()),
            _ => None,
        }
    }

    /// Texts without an error of the driver's or of cuBLAS are candle's own affair: a dtype it has no kernel for.
    fn of_candle(says: &str) -> Option<(String, Self)> {
        let names = ["CUDA_ERROR_", "CUBLAS_STATUS_", "CURAND_STATUS_"];
        names
            .iter()
            .any(|name| says.contains(name))
            .then(|| ("cuda".to_owned(), Self::from_text(says)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Says(&'static str);

    const FULL: &str = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";

    fn through_candle(says: &'static str) -> Error {
        Error::from(candle_core::Error::Cuda(Box::new(Says(says))))
    }

    fn reason(err: &Error) -> Option<&DeviceError> {
        match err {
            Error::Device { reason, .. } => Some(reason),
            _ => None,
        }
    }

    #[test]
    fn what_the_driver_says_is_told_apart() {
        let driver = |name: &str| DeviceError::from_text(&format!("DriverError({name}, \"text\")"));
        assert!(matches!(
            driver("CUDA_ERROR_NO_DEVICE"),
            DeviceError::NoGpu(_)
        ));
        assert!(matches!(
            driver("CUDA_ERROR_INVALID_DEVICE"),
            DeviceError::NoGpu(_)
        ));
        assert!(matches!(
            driver("CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
            DeviceError::Driver(_)
        ));
        assert!(matches!(
            driver("CUDA_ERROR_INVALID_PTX"),
            DeviceError::Refused(_)
        ));
        assert!(matches!(
            driver("CUDA_ERROR_ILLEGAL_ADDRESS"),
            DeviceError::Lost(_)
        ));
        assert!(matches!(
            driver("CUDA_ERROR_INVALID_VALUE"),
            DeviceError::Other(_)
        ));
        // One name begins with another's letters.
        assert!(matches!(
            driver("CUDA_ERROR_INVALID_DEVICE_X"),
            DeviceError::Other(_)
        ));
        for says in [
            FULL,
            "CublasError(CUBLAS_STATUS_ALLOC_FAILED)",
            "CUDA_ERROR_OUT_OF_MEMORY",
        ] {
            assert!(
                matches!(DeviceError::from_text(says), DeviceError::OutOfMemory(_)),
                "{says}"
            );
        }
        assert!(matches!(DeviceError::from_text(""), DeviceError::Other(_)));
    }

    #[test]
    fn memory_that_candle_did_not_get_is_an_error_of_the_device() {
        let err = through_candle(FULL);
        assert!(
            matches!(reason(&err), Some(DeviceError::OutOfMemory(_))),
            "{err:?}"
        );
        let text = err.to_string();
        assert!(
            text.contains(FULL) && text.contains("lower max_len"),
            "{text}"
        );
        // With context, and as the error of a wait.
        let inner = candle_core::Error::wrap(Says(FULL)).context("in a layer");
        assert!(matches!(
            reason(&inner.into()),
            Some(DeviceError::OutOfMemory(_))
        ));
    }

    #[test]
    fn errors_of_candle_itself_stay_its_own() {
        for err in [
            through_candle("unsupported dtype F8E4M3 for matmul"),
            candle_core::Error::Msg("no CUDA_ERROR_OUT_OF_MEMORY here".into()).into(),
        ] {
            assert!(matches!(err, Error::Candle(_)), "{err:?}");
        }
    }

    #[test]
    fn an_error_of_a_device_passes_through_candle_unchanged() {
        let own = Error::device("kernel x", DeviceError::TooOld((7, 5)));
        let text = own.to_string();
        let back = Error::from(candle_core::Error::from(own).context("in a layer"));
        assert_eq!(reason(&back), Some(&DeviceError::TooOld((7, 5))));
        assert_eq!(back.to_string(), text);
        assert!(
            text.contains("kernel x") && text.contains("7.5") && text.contains("`cpu`"),
            "{text}"
        );
    }
}
