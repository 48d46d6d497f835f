//! The operations of an Engram layer as candle custom ops, each with a plain reference on slices.

mod dispatch;
pub mod engram_gate;
pub mod engram_hash;
pub mod engram_lookup;
