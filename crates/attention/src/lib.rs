//! Sliding-window plus compressed sparse attention of DeepSeek-V4.1.
