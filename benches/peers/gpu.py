"""Times what PyTorch and Triton make of the operations that `gpu_check bench` times, at the same shapes.

    python benches/peers/gpu.py [--only linear,experts,attention,hyperconn,gate,engram]

Needs a CUDA GPU, PyTorch and Triton.  Prints a row for each: operation, shape, who computes it, microseconds
(the median of replays of a CUDA graph of several calls, so that no launch is waited for), TFLOP/s or GB/s.
Every peer is first compared with a plain formula; one that differs is an error and is not timed.
The Triton kernels are Engram's lookup and hash written from their formulas.  Weights rotate over copies that the
second-level cache does not hold.
"""

import argparse
import itertools
import statistics
import sys

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

DEV = "cuda"
DIM, HEADS, HEAD_DIM, COPIES, ITERS = 5120, 64, 512, 4, 20
INTER, EXPERTS, TOP_K = 2304, 384, 6
LINEARS = [(5120, 1280), (1280, 32768), (8192, 5120), (5120, 2304)]
# Bytes that no cache of such a card holds.
COLD = 256 << 20


def microseconds(call, calls=20, replays=15):
    """A call's time inside a graph of `calls` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def row(op, shape, who, us, flops=0, nbytes=0):
    rate = f"{flops / us / 1e6:8.1f} TFLOP/s" if flops else f"{nbytes / us / 1e3:8.0f} GB/s"
    print(f"{op:<14} {shape:<40} {who:<26} {us:10.1f} us {rate}", flush=True)


def close(name, got, want, bound):
    error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30)
    if not error <= bound:
        raise AssertionError(f"{name}: relative difference {error.item():.2e} above {bound}")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEV, dtype=torch.float32).to(dtype)


def in_turn(items):
    turns = itertools.cycle(items)
    return lambda: next(turns)


def ceilings():
    source = torch.empty(1 << 29, device=DEV, dtype=torch.float32)
    target = torch.empty_like(source)
    us = microseconds(lambda: target.copy_(source), calls=4)
    row("copy", "2 GiB", "PyTorch", us, nbytes=2 * source.nbytes)
    x, w = normal(8192, 8192), normal(8192, 8192)
    row("product", "8192^3 bf16", "cuBLAS", microseconds(lambda: x @ w, calls=4), flops=2 * 8192**3)


def linear():
    """cuBLASLt's fp8 has one scale for a whole matrix, so it does less than a scale for every 32 columns."""
    one = torch.ones((), device=DEV)
    for k, n in LINEARS:
        codes = [normal(n, k).to(torch.float8_e4m3fn) for _ in range(max(2, COLD // (n * k)))]
        wide = [w.to(torch.bfloat16) for w in codes[: max(2, len(codes) // 2)]]
        for m in (16, 4096):
            x, turn = normal(m, k).to(torch.float8_e4m3fn), in_turn(codes)
            product = lambda: torch._scaled_mm(x, turn().t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
            close("_scaled_mm", product(), x.float() @ codes[0].float().t(), 1e-2)
            few = dict(nbytes=n * k) if m == 16 else dict(flops=2 * m * n * k)
            row("linear fp8", f"M{m} {k}->{n}", "_scaled_mm, one scale", microseconds(product), **few)
        for m in (1, 16, 4096):
            x, turn = normal(m, k), in_turn(wide)
            few = dict(nbytes=2 * n * k) if m <= 16 else dict(flops=2 * m * n * k)
            us = microseconds(lambda: F.linear(x, turn()))
            row("linear fp8", f"M{m} {k}->{n}", "bf16 dequantised, cuBLAS", us, **few)


def experts():
    """One token's six experts with weights widened to bf16 beforehand, as many as a rotation needs."""
    held = [(normal(2 * INTER, DIM), normal(DIM, INTER)) for _ in range(4 * TOP_K)]
    turn, x = in_turn(held), normal(1, DIM)

    def token():
        total = torch.zeros(1, DIM, device=DEV)
        for _ in range(TOP_K):
            up, down = turn()
            gate, value = F.linear(x, up).float().chunk(2, -1)
            total += F.linear((F.silu(gate) * value).to(torch.bfloat16), down).float()
        return total

    us = microseconds(token, calls=4)
    row("experts", f"T1, {TOP_K} of {EXPERTS}, {DIM}<->{INTER}", "bf16 resident, cuBLAS", us, nbytes=TOP_K * 6 * DIM * INTER)


def attend(q, kv, sink, indices):
    """softmax over the rows named, with a sink in the denominator; -1 names none."""
    rows = kv[indices.clamp_min(0)]
    scores = torch.einsum("thd,tnd->thn", q, rows).float() * HEAD_DIM**-0.5
    scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
    most = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - most).exp()
    return torch.einsum("thn,tnd->thd", (weights / total).to(torch.bfloat16), rows)


def attention():
    compiled = torch.compile(attend, dynamic=False)
    for t, n in ((1, 4224), (64, 4224), (1024, 6144)):
        q, kv, sink = normal(t, HEADS, HEAD_DIM), normal(n, HEAD_DIM), torch.randn(HEADS, device=DEV)
        indices = torch.randint(0, n, (t, 640), device=DEV)
        indices[:, -7:] = -1
        shape, flops = f"{t} queries, {HEADS}x{HEAD_DIM}, 640 of {n} rows", 4 * t * HEADS * HEAD_DIM * 633
        calls = 20 if t == 1 else 2
        row("sparse_attn", shape, "eager", microseconds(lambda: attend(q, kv, sink, indices), calls), flops=flops)
        close("torch.compile", compiled(q, kv, sink, indices), attend(q, kv, sink, indices), 2e-2)
        row("sparse_attn", shape, "torch.compile", microseconds(lambda: compiled(q, kv, sink, indices), calls), flops=flops)


def between_sublayers(y, stream, post, comb, fn, scale, base, weight):
    """Ends one sublayer and begins the next: stream, normed input, and the coefficients of that one."""
    c, eps = COPIES, 1e-6
    mixed = torch.einsum("tjk,tjd->tkd", comb, stream.float())
    stream = (post[:, :, None] * y.float()[:, None] + mixed).to(torch.bfloat16)
    flat = stream.flatten(1).float()
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    pre = torch.sigmoid(mixes[:, :c] * scale[0] + base[:c]) + eps
    post = 2 * torch.sigmoid(mixes[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    comb = (mixes[:, 2 * c :] * scale[2] + base[2 * c :]).unflatten(-1, (c, c)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(ITERS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    x = torch.einsum("tc,tcd->td", pre, stream.float()).to(torch.bfloat16).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight
    return stream, x.to(torch.bfloat16), post, comb


def hyperconn():
    compiled = torch.compile(between_sublayers, dynamic=False)
    for t in (1, 4096):
        inputs = (
            normal(t, DIM),
            normal(t, COPIES, DIM),
            torch.rand(t, COPIES, device=DEV),
            torch.rand(t, COPIES, COPIES, device=DEV),
            normal(24, COPIES * DIM, dtype=torch.float32) * 0.01,
            torch.randn(3, device=DEV),
            torch.randn(24, device=DEV),
            torch.rand(DIM, device=DEV),
        )
        for got, want in zip(compiled(*inputs), between_sublayers(*inputs)):
            close("torch.compile", got, want, 2e-2)
        # Read: y and stream; written: stream and x; the projection once.
        nbytes = 2 * t * DIM * (1 + COPIES + COPIES + 1) + 4 * 24 * COPIES * DIM
        shape = f"{t}x{COPIES}x{DIM}, between sublayers"
        row("hyper-conn", shape, "eager", microseconds(lambda: between_sublayers(*inputs), 4), nbytes=nbytes)
        row("hyper-conn", shape, "torch.compile", microseconds(lambda: compiled(*inputs), 4), nbytes=nbytes)


def route(x, weight, bias):
    """sqrt(softplus) scores; the bias chooses and does not weigh."""
    scores = F.softplus(F.linear(x.float(), weight)).sqrt()
    chosen = (scores + bias).topk(TOP_K, -1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def gate():
    compiled = torch.compile(route, dynamic=False)
    weight, bias = normal(EXPERTS, DIM, dtype=torch.float32), torch.rand(EXPERTS, device=DEV)
    for t in (1, 64, 4096):
        x = normal(t, DIM)
        nbytes = 4 * EXPERTS * DIM + 2 * t * DIM
        row("gate", f"T{t}, {TOP_K} of {EXPERTS}", "eager", microseconds(lambda: route(x, weight, bias)), nbytes=nbytes)
        close("torch.compile", compiled(x, weight, bias)[1], route(x, weight, bias)[1], 1e-3)
        row("gate", f"T{t}, {TOP_K} of {EXPERTS}", "torch.compile", microseconds(lambda: compiled(x, weight, bias)), nbytes=nbytes)


@triton.jit
def lookup_kernel(ids, codes, scales, out, rows, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    source = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    both = inside[:, None] & (column < WIDTH)[None]
    code = tl.load(codes + source[:, None] * WIDTH + column[None], mask=both, other=0.0)
    byte = tl.load(scales + source[:, None] * (WIDTH // GROUP) + (column // GROUP)[None], mask=both, other=0)
    # The bits of 2^(byte - 127) for the bytes 1 to 254.
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = code.to(tl.float32) * scale
    tl.store(out + at[:, None] * WIDTH + column[None], value.to(tl.bfloat16), mask=both)


@triton.jit
def hash_kernel(ids, multipliers, primes, offsets, out, tokens, pad, ORDERS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    # `ids` begins with the ORDERS - 1 tokens before the first; -1 stands where there is none.
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HEADS)
    inside = token < tokens
    rolling = tl.zeros((BLOCK,), tl.int64)
    missing = tl.zeros((BLOCK,), tl.int1)
    for back in tl.static_range(ORDERS):
        term = tl.load(ids + token + (ORDERS - 1 - back), mask=inside, other=-1)
        missing = missing | (term < 0)
        rolling = rolling ^ (tl.where(missing, pad, term).to(tl.int64) * tl.load(multipliers + back))
        if back > 0:
            column = (back - 1) * HEADS + head
            prime, offset = tl.load(primes + column), tl.load(offsets + column)
            where = rolling[:, None] % prime[None] + offset[None]
            at = token[:, None] * ((ORDERS - 1) * HEADS) + column[None]
            tl.store(out + at, where.to(tl.int32), mask=inside[:, None])


def hashes(ids, multipliers, primes, offsets, pad, orders, heads):
    """[tokens, (orders - 1) * heads], the formula column by column."""
    tokens = ids.numel() - orders + 1
    rolling = torch.zeros(tokens, dtype=torch.int64, device=DEV)
    missing = torch.zeros(tokens, dtype=torch.bool, device=DEV)
    columns = []
    for back in range(orders):
        term = ids[orders - 1 - back :][:tokens].long()
        missing |= term < 0
        rolling ^= torch.where(missing, pad, term) * multipliers[back]
        if back > 0:
            part = slice((back - 1) * heads, back * heads)
            columns.append(rolling[:, None] % primes[part] + offsets[part])
    return torch.cat(columns, 1).int()


def engram():
    orders, heads, width, group, pad, vocab = 4, 8, 256, 32, 2, 99_092
    columns = (orders - 1) * heads
    # Any odd numbers of that size cost what primes cost.
    primes = torch.arange(columns, device=DEV) * 18 + 16_000_057
    offsets = torch.cumsum(primes, 0) - primes
    multipliers = torch.randint(1 << 30, 46_539_438_283_891, (orders,), device=DEV) * 2 + 1
    for t in (1, 4, 64, 1024):
        ids = torch.randint(0, vocab, (t + orders - 1,), device=DEV, dtype=torch.int32)
        ids[0] = -1
        out = torch.empty(t, columns, device=DEV, dtype=torch.int32)
        call = lambda: hash_kernel[(triton.cdiv(t, 32),)](ids, multipliers, primes, offsets, out, t, pad, orders, heads, 32)  # noqa: E731
        call()
        assert torch.equal(out, hashes(ids, multipliers, primes, offsets, pad, orders, heads)), "hash kernel"
        row("engram hash", f"T{t}, {columns} columns", "Triton", microseconds(call), nbytes=out.nbytes)
    rows = 16_000_000
    for where in ("device memory", "pinned host memory"):
        place = dict(device=DEV) if where == "device memory" else dict(pin_memory=True)
        codes = torch.full((rows, width), 0x38, dtype=torch.uint8, **place)
        scales = torch.full((rows, width // group), 127, dtype=torch.uint8, **place)
        for chunk in range(0, rows, 1 << 21):
            # Something else in every row.
            codes[chunk : chunk + (1 << 21), 0] = chunk >> 21
        table = codes.view(torch.float8_e4m3fn)
        for t in (1, 4, 64, 1024):
            turns = [torch.randint(0, rows, (t * columns,), device=DEV, dtype=torch.int32) for _ in range(20)]
            turn, out = in_turn(turns), torch.empty(t * columns, width, device=DEV, dtype=torch.bfloat16)
            run = lambda ids: lookup_kernel[(triton.cdiv(t * columns, 8),)](ids, table, scales, out, t * columns, width, group, 8)  # noqa: E731
            run(turns[0])
            picked = turns[0].to(codes.device).long()
            close("lookup kernel", out.cpu(), table.view(torch.uint8)[picked].view(torch.float8_e4m3fn).cpu().float(), 0.0)
            us = microseconds(lambda: run(turn()))
            row("engram lookup", f"T{t} x {columns} rows, {where}", "Triton", us, nbytes=t * columns * (width + width // group + 2 * width))
        del codes, scales, table


PARTS = dict(linear=linear, experts=experts, attention=attention, hyperconn=hyperconn, gate=gate, engram=engram)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts, separated by commas: " + ",".join(PARTS))
    chosen = parser.parse_args().only
    chosen = chosen.split(",") if chosen else list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part named {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU that PyTorch can use")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "Triton", triton.__version__, flush=True)
    ceilings()
    failed = 0
    for name in chosen:
        try:
            PARTS[name]()
        except Exception as error:  # One peer that this installation lacks should not hide the others.
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        torch.cuda.empty_cache()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
