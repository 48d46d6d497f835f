//! Criterion benches of deepseek-v41.
