//! Hyper-connections of DeepSeek-V4.1: Sinkhorn-normalised residual streams.
