//! fp8 and fp4 formats and linear layers of DeepSeek-V4.1 as candle custom ops.
