//! Engram n-gram memory of DeepSeek-V4.1.
