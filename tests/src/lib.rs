//! End-to-end tests of deepseek-v41.
