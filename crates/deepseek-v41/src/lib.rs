//! DeepSeek-V4.1 inference in Rust on candle.
