#!/usr/bin/env python3
"""Splits a safetensors file into two shards of about equal size, byte for byte.

    python3 split.py MODEL.safetensors SHARD-1 SHARD-2

A registry package may hold 10 MB, and the tiny model compresses to 13: it travels as two packages.
Tensors go to the shards in the order of their names, so a layer is cut at most once; inside a shard
they are laid out widest type first, as the safetensors library does, so that each stays aligned.

Prints the number of tensors and their digest: 64-bit FNV-1a over, in the order of names, each
tensor's name, dtype and shape (decimal numbers joined by commas), each ended by a zero byte, then its
bytes. `tests/tests/tiny_data.rs` computes the same through the library's own loader.

Needs nothing but Python itself.
"""

import json
import struct
import sys

WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}


def read(path):
    """-> {name: (dtype, shape, bytes)}"""
    with open(path, "rb") as f:
        data = f.read()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + n :]
    return {
        name: (t["dtype"], t["shape"], bytes(body[t["data_offsets"][0] : t["data_offsets"][1]]))
        for name, t in header.items()
    }


def write(path, tensors):
    order = sorted(tensors, key=lambda name: (-WIDTH.get(tensors[name][0], 1), name))
    header, at = {}, 0
    for name in order:
        dtype, shape, raw = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)))
        f.write(text)
        for name in order:
            f.write(tensors[name][2])


def digest(tensors):
    h = 0xCBF29CE484222325
    for name in sorted(tensors):
        dtype, shape, raw = tensors[name]
        text = b"\0".join(s.encode() for s in (name, dtype, ",".join(map(str, shape)), ""))
        for byte in text + raw:
            h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def main(source, first, second):
    tensors = read(source)
    half = sum(len(t[2]) for t in tensors.values()) / 2
    shards, filled = ({}, {}), 0
    for name in sorted(tensors):
        shards[filled >= half][name] = tensors[name]
        filled += len(tensors[name][2])
    write(first, shards[0])
    write(second, shards[1])
    again = {**read(first), **read(second)}
    assert again == tensors, "the shards do not hold what the file holds"
    print(f"{len(shards[0])} + {len(shards[1])} tensors, digest {digest(again):#018x}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
