//! CUDA kernels of DeepSeek-V4.1 inference.
