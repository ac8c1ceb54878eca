# SPDX-License-Identifier: Apache-2.0
"""What programs of tiles.py mean, by whole tensors of torch: regions with steps, beyond edges, of packed types."""

import torch

PACKED = {"int4": 4, "uint4": 4, "uint2": 2, "float4_e2m1fn": 4}  # bits; tensors hold several elements in a byte
CODES = torch.tensor([0, 2, 4, 5])  # of float4_e2m1fn, for 0 to 3


def torch_dtype(dtype):
    """The type of torch that has all values of a type."""
    if dtype in PACKED:
        return torch.float32 if "float" in dtype else torch.int8 if dtype == "int4" else torch.uint8
    return getattr(torch, dtype)


def packed(x, dtype):
    """The bytes of a packed tensor, the first element lowest."""
    codes = CODES[x.long()] if "float" in dtype else x.long()
    bits, count = PACKED[dtype], 8 // PACKED[dtype]
    parts = (codes & (2**bits - 1)).unflatten(-1, (-1, count))
    found = sum(parts[..., n] << (bits * n) for n in range(count)).to(torch.uint8)
    return found.view({"int4": torch.int8, "float4_e2m1fn": torch.float4_e2m1fn_x2}.get(dtype, torch.uint8))


def unpacked(x, dtype):
    bits = PACKED[dtype]
    codes = x.view(torch.uint8).long()
    codes = torch.stack([(codes >> (bits * n)) & (2**bits - 1) for n in range(8 // bits)], -1).flatten(-2)
    if "float" in dtype:
        codes = (codes[..., None] == CODES).long().argmax(-1)
    elif dtype == "int4":
        codes = (codes ^ 8) - 8
    return codes.to(torch_dtype(dtype))


def wide(x):
    return x.to(torch.float64 if x.is_floating_point() else torch.int64)


def tile(shape, dtype, value):
    return torch.full(shape, value).to(torch_dtype(dtype))


def places(x, starts, extents, steps):
    """The indices of a region, which broadcast to its extents."""
    found = []
    for d, (s, e, k) in enumerate(zip(starts, extents, steps or (1,) * x.ndim, strict=True)):
        found.append((int(s) + k * torch.arange(e)).reshape([-1 if n == d else 1 for n in range(x.ndim)]))
    return found


def read(x, starts, extents, steps=None):
    """A region; 0 outside of the tensor."""
    return at(x, *places(x, starts, extents, steps))


def write(x, starts, extents, *rest):
    """Store a region; what is outside of the tensor is dropped."""
    *steps, value = rest
    put(x, places(x, starts, extents, *steps or [None]), value.reshape(extents))


def at(x, *index):
    """Elements by indices for each lane; 0 outside."""
    index, inside = clamped(x, index)
    return torch.where(inside, wide(x[index]), torch.zeros((), dtype=wide(x[(0,) * x.ndim]).dtype))


def put(x, index, value):
    """Store elements by indices for each lane; those outside are dropped."""
    index, inside = clamped(x, index)
    shape = torch.broadcast_shapes(*(i.shape for i in index), value.shape)
    index, inside = tuple(i.expand(shape)[inside.expand(shape)] for i in index), inside.expand(shape)
    x[index] = value.expand(shape)[inside].to(x.dtype)


def clamped(x, index):
    index = [torch.as_tensor(i) for i in index]
    inside = torch.ones((), dtype=torch.bool)
    for i, n in zip(index, x.shape, strict=True):
        inside = inside & (i >= 0) & (i < n)
    return tuple(i.clamp(0, n - 1) for i, n in zip(index, x.shape, strict=True)), inside


def lanes(*extents):
    return torch.meshgrid(*map(torch.arange, extents), indexing="ij")


FOLDS = {
    "sum": lambda x, d: x.sum(d), "max": lambda x, d: x.amax(d), "min": lambda x, d: x.amin(d),
    "abssum": lambda x, d: x.abs().sum(d), "absmax": lambda x, d: x.abs().amax(d),
}  # fmt: skip
JOINS = {"sum": torch.add, "abssum": torch.add, "max": torch.maximum, "absmax": torch.maximum, "min": torch.minimum}


def fold(kind, x, dim, before):
    found = FOLDS[kind](x, dim)
    return found if before is None else JOINS[kind](found, before.reshape(found.shape).to(found.dtype))


def running(kind, x, dim, reverse):
    x = x.flip(dim) if reverse else x
    found = x.cumsum(dim) if kind == "cumsum" else x.cummax(dim).values
    return found.flip(dim) if reverse else found


REFERENCE = {
    "torch": torch, "tile": tile, "read": read, "write": write, "at": at, "put": put, "lanes": lanes, "fold": fold,
    "running": running, "JOINS": JOINS, "wide": wide,
}  # fmt: skip
