"""Times Pillow and numpy on the steps that deepseek-v41-vision's preprocessing does.

    python benches/peers/pillow_preprocess.py FILE.jpg [--repeat N]

Prints milliseconds (best and median of N): decode to RGB, scale and pad to the patch grid, normalise and
cut into patches.  `cargo bench -p deepseek-v41-vision` writes the picture and prints its path.
numpy has no bfloat16, so the peer stops at float32 patches.
"""

import argparse
import io
import math
import statistics
import time

import numpy as np
from PIL import Image, ImageOps, __version__

PATCH, RATIO, BUDGET, MIN_PIXELS = 14, 3, 1024, 295_936


def grid(width, height):
    """Pixel size of the grid of an ordinary large photograph (released settings)."""
    if width * height < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        width, height = int(width * grow), int(height * grow)
    rows, cols = (math.ceil(math.ceil(v / PATCH) / RATIO) for v in (height, width))
    if rows * (cols + 1) + 2 <= BUDGET:
        return math.ceil(width / PATCH) * PATCH, math.ceil(height / PATCH) * PATCH
    aspect, cell = height / width, PATCH * RATIO
    cols = math.sqrt((BUDGET - 2) / aspect + 0.25) - 0.5
    scale = min(math.floor(cols) * cell / width, math.floor(cols * aspect) * cell / height)
    return tuple(math.floor(v * scale / PATCH) * PATCH for v in (width, height))


def decode(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.load()
    return image


def fit(image):
    return ImageOps.pad(image, grid(image.width, image.height), color=(127, 127, 127))


def patches(image):
    x = (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.5
    h, w = x.shape[0] // PATCH, x.shape[1] // PATCH
    x = x.reshape(h, PATCH, w, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(x).reshape(h * w, 3, PATCH, PATCH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    with open(args.file, "rb") as f:
        data = f.read()
    times = {"decode": [], "resize": [], "normalise": [], "whole": []}
    for _ in range(args.repeat):
        t = [time.perf_counter()]
        image = decode(data)
        t.append(time.perf_counter())
        image = fit(image)
        t.append(time.perf_counter())
        patches(image)
        t.append(time.perf_counter())
        for name, (a, b) in zip(times, ((0, 1), (1, 2), (2, 3), (0, 3))):
            times[name].append((t[b] - t[a]) * 1e3)
    print(f"Pillow {__version__}, {args.file}, grid {image.size}")
    for name, ms in times.items():
        print(f"{name:10} best {min(ms):8.2f} ms   median {statistics.median(ms):8.2f} ms")


if __name__ == "__main__":
    main()
