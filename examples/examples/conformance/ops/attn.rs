//! Sparse attention, and the Sinkhorn split of hyper-connections.

use deepseek_v41::{
    Result,
    attention::ops::{KvScope, sparse_attn},
    hyperconn::{SinkhornParams, split_sinkhorn},
};

use crate::{
    case::{Case, f32s},
    tolerance::{SINKHORN, SPARSE_ATTN},
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    if case.name.starts_with("sparse_attn_") {
        attend(case)?;
    } else if case.name.starts_with("sinkhorn_") {
        sinkhorn(case)?;
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn attend(case: &mut Case<'_>) -> Result<()> {
    let (q, kv) = (case.tensor("q")?, case.tensor("kv")?);
    let (sink, idx) = (case.tensor("sink")?, case.tensor("idx")?);
    let scale = (q.dims()[3] as f32).powf(-0.5);
    let mut got = Vec::new();
    for b in 0..q.dims()[0] {
        let (kv, idxs) = (kv.get(b)?, idx.get(b)?);
        let scope = KvScope::new(&kv, &idxs);
        got.extend(f32s(&sparse_attn(&q.get(b)?, &[scope], &sink, scale)?)?);
    }
    for part in ["out", "exact"] {
        let want = case.f32s(part)?;
        case.close(part, &got, &want, SPARSE_ATTN)?;
    }
    Ok(())
}

fn sinkhorn(case: &mut Case<'_>) -> Result<()> {
    let params = SinkhornParams {
        hc_mult: case.noted("hc")?,
        iters: case.noted("iters")?,
        eps: case.noted("eps")?,
    };
    let (mixes, scale, base) = (
        case.tensor("mixes")?,
        case.tensor("scale")?,
        case.tensor("base")?,
    );
    let mix = split_sinkhorn(&mixes.flatten(0, 1)?, &scale, &base, params)?;
    case.close_tensor(mix.pre.tensor(), "pre", SINKHORN)?;
    case.close_tensor(&mix.post, "post", SINKHORN)?;
    case.close_tensor(&mix.comb, "comb", SINKHORN)
}
