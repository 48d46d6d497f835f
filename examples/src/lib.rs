//! Runnable examples of deepseek-v41.
