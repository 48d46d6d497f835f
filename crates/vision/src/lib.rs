//! Vision tower and image preprocessing of DeepSeek-V4.1.
