//! Mixture of experts of DeepSeek-V4.1: gate, grouped fp4 experts, shared expert.
