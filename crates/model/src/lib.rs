//! The DeepSeek-V4.1 transformer assembled from its layers.
