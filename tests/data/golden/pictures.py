"""Rows that PyTorch makes of the golden pictures, for `pictures.safetensors`.

    python pictures.py        # beside the golden data; torch 2.15.0, safetensors

PyTorch's fused attention has another approximation of the exponential for every vector width, and its matrix
library may add in another order. So one tower has several valid runs, whose rows differ:

    avx2     as on the machine that recorded the golden data: these are the rows in ops_vision, bit for bit
    avx512   as on a machine with wider vectors
    wide     sums and exponentials in float64, rounded to bf16 where the others round

Each is a process of its own, because PyTorch reads these settings when it starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
RUNS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "wide": {"ATEN_CPU_CAPABILITY": "default"},
}


def wide_attention(q, k, v):
    """Weights are rounded where they meet the values and summed as they are."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return (p.bfloat16().double() @ v / p.sum(-1, keepdim=True)).bfloat16()


class Tower:
    """Weights by their names in the checkpoint, and the settings of its config."""

    def __init__(self, weights, cfg, wide):
        self.w, self.cfg, self.wide = weights, cfg, wide
        self.attention = wide_attention if wide else F.scaled_dot_product_attention

    def linear(self, x, name):
        w, b = self.w[f"{name}.weight"], self.w.get(f"{name}.bias")
        if self.wide:
            return F.linear(x.double(), w.double(), None if b is None else b.double()).bfloat16()
        return F.linear(x, w, b)

    def norm(self, x, name):
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return (self.w[f"{name}.weight"].float() * x).bfloat16()

    def angles(self, n_h, n_w):
        half = self.cfg["vision_dim"] // self.cfg["vision_n_heads"] // 2
        freq = 1.0 / self.cfg.get("vision_rope_theta", 1e4) ** (torch.arange(0, half, 2).float() / half)
        y, x = torch.meshgrid(torch.arange(n_h).float(), torch.arange(n_w).float(), indexing="ij")
        return torch.cat([y.reshape(-1, 1) * freq, x.reshape(-1, 1) * freq], -1)[:, None]

    def rotate(self, x, angles):
        a, b = x.float().chunk(2, -1)
        c, s = angles.cos(), angles.sin()
        return torch.cat([a * c - b * s, b * c + a * s], -1).bfloat16()

    def features(self, patches, n_h, n_w):
        angles, heads = self.angles(n_h, n_w), self.cfg["vision_n_heads"]
        x = self.linear(patches.flatten(1), "vision.patch_embed.proj")
        for i in range(self.cfg["vision_n_layers"]):
            at = f"vision.blocks.{i}"
            q, k, v = self.linear(self.norm(x, f"{at}.norm1"), f"{at}.attn.wqkv").unflatten(-1, (3, heads, -1)).unbind(1)
            q, k = self.rotate(q, angles), self.rotate(k, angles)
            o = self.attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
            x = x + self.linear(o.transpose(0, 1).flatten(1), f"{at}.attn.wo")
            gate, up = self.linear(self.norm(x, f"{at}.norm2"), f"{at}.mlp.w1").chunk(2, -1)
            x = x + self.linear(F.silu(gate) * up, f"{at}.mlp.w2")
        return self.norm(x, "vision.norm")

    def tokens(self, features, n_h, n_w):
        r = self.cfg["vision_downsample_ratio"]
        grid = F.pad(features.view(n_h, n_w, -1), (0, 0, 0, -n_w % r, 0, -n_h % r))
        cells = grid.unfold(0, r, r).unfold(1, r, r).flatten(0, 1).flatten(1)
        return self.linear(F.gelu(self.linear(cells, "aligner.w1")), "aligner.w2")


def rows(run):
    """Everything one run makes, by name."""
    out = {}
    ops = load_file(HERE / "ops_vision.safetensors")
    cfg = json.loads((HERE / "manifest.json").read_text())["ops"]["vision"]["cases"]["vit"]["args"]
    tower = Tower({k.removeprefix("vit."): v for k, v in ops.items()}, cfg, run == "wide")
    for i in range(3):
        grid = ops[f"vit.{i}.grid"].tolist()
        features = tower.features(ops[f"vit.{i}.patches"], *grid)
        out[f"vit.{i}.{run}.features"] = features
        out[f"vit.{i}.{run}.tokens"] = tower.tokens(features, *grid)
    for folder in sorted(HERE.glob("model_*")):
        expected = safe_open(folder / "expected.safetensors", "pt")
        pictures = [k.removesuffix(".patches") for k in expected.keys() if k.endswith(".patches")]
        weights = {}
        for shard in folder.glob("model-*.safetensors"):
            f = safe_open(shard, "pt")
            weights |= {k: f.get_tensor(k) for k in f.keys() if k.startswith(("vision.", "aligner."))}
        tower = Tower(weights, json.loads((folder / "config.json").read_text()), run == "wide")
        for key in sorted(pictures):
            grid = expected.get_tensor(f"{key}.info").tolist()[1:]
            features = tower.features(expected.get_tensor(f"{key}.patches"), *grid)
            out[f"{folder.name}.{key}.{run}.tokens"] = tower.tokens(features, *grid)
    return {k: v.contiguous() for k, v in out.items()}


def main():
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        with torch.no_grad():
            save_file(rows(sys.argv[1]), sys.argv[2])
        return
    merged = {}
    for run, env in RUNS.items():
        part = HERE / f"{run}.part"
        subprocess.run([sys.executable, __file__, run, part], env=os.environ | env, check=True)
        merged |= load_file(part)
        part.unlink()
    save_file(merged, HERE / "pictures.safetensors", metadata={"torch": torch.__version__})


if __name__ == "__main__":
    main()
