//! What several examples and the end-to-end tests share: replaying recorded runs.

pub mod expected;
#[cfg(feature = "chat")]
pub mod fixtures;
pub mod golden_model;
