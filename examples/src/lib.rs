//! What several examples and the end-to-end tests share: replaying recorded runs.

pub mod expected;
pub mod golden_model;
