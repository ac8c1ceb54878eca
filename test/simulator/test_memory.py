# SPDX-License-Identifier: Apache-2.0
import math
import random

import pytest
import torch

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import const
from torch_tile.simulator.memory import Storage, inside, lane_ids, poisoned


def buffer_of(shape, dtype):
    return Buffer("b", tuple(const(n, dt.int32) for n in shape), dtype, "shared")


def content(shape, dtype):
    """Random numbers of any dtype, small enough for each."""
    if dtype.is_float:
        return (torch.randn(shape) * 4).to(dtype.as_torch())
    if dtype.kind == "bool":
        return torch.rand(shape) > 0.5
    low = 0 if dtype.kind == "uint" else -100
    return torch.randint(low, 100, shape).to(dtype.as_torch())


def plain(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


@pytest.mark.parametrize("dtype", dt.ALL, ids=str)
def test_elements_come_back(dtype):
    """What is stored at index tensors is what is read there, for every dtype, by lanes and one by one."""
    storage = Storage(buffer_of((5, 7), dtype), content((5, 7), dtype))
    i, j = torch.randperm(5)[:, None], torch.randperm(7)
    value = storage.get((i, j))
    assert torch.equal(plain(value), plain(storage.tensor)[i, j])
    assert float(storage.get((2, 3))) == plain(storage.tensor)[2, 3].item()
    other = Storage(buffer_of((5, 7), dtype), poisoned((5, 7), dtype))
    other.raw[(i, j)] = other.bits_of(value)
    assert torch.equal(plain(other.tensor), plain(storage.tensor))
    other.raw[(1, 1)] = other.bits_of(storage.get((2, 3)))
    assert plain(other.tensor)[1, 1] == plain(storage.tensor)[2, 3]


def test_elements_are_copies():
    storage = Storage(buffer_of((3,), dt.float32), torch.zeros(3))
    value = storage.get((1,))
    storage.raw[(1,)] = 5.0
    assert value.item() == 0.0


@pytest.mark.parametrize("dtype", [dt.uint8, dt.uint16, dt.uint32], ids=str)
def test_large_unsigned_numbers(dtype):
    top = (1 << dtype.bits) - 1
    storage = Storage(buffer_of((2,), dtype), poisoned((2,), dtype))
    storage.raw[(0,)] = storage.bits_of(top)
    storage.raw[(torch.tensor([1]),)] = storage.bits_of(torch.tensor([top - 1]))
    assert storage.get((0,)) == top
    assert storage.get((torch.tensor([0, 1]),)).tolist() == [top, top - 1]


@pytest.mark.parametrize("dtype", [dt.float32, dt.bfloat16, dt.float8_e4m3fn, dt.int32, dt.uint32, dt.bool_], ids=str)
def test_boxes(dtype, seed):
    """Reading and writing boxes that stick out on any side."""
    draw = random.Random(seed)
    for _ in range(30):
        shape = [draw.randint(1, 6) for _ in range(2)]
        extents = [draw.randint(1, 6) for _ in range(2)]
        starts = [draw.randint(-4, 6) for _ in range(2)]
        storage = Storage(buffer_of(shape, dtype), content(shape, dtype))
        before = plain(storage.tensor).clone()
        tile = storage.read_box(starts, extents)
        assert tile.dtype == dtype.as_torch() and list(tile.shape) == extents
        new = content(extents, dtype)
        storage.write_box(starts, new)
        for i in range(-4, 12):
            for j in range(-4, 12):
                in_buffer = 0 <= i < shape[0] and 0 <= j < shape[1]
                a, b = i - starts[0], j - starts[1]
                if 0 <= a < extents[0] and 0 <= b < extents[1]:
                    assert plain(tile)[a, b] == (before[i, j] if in_buffer else 0)
                    assert not in_buffer or plain(storage.tensor)[i, j] == plain(new)[a, b]
                elif in_buffer:
                    assert plain(storage.tensor)[i, j] == before[i, j]


def test_strided_tensors():
    base = torch.arange(24.0).reshape(4, 6)
    storage = Storage(buffer_of((6, 4), dt.float32), base.T)
    assert storage.get((5, 3)).item() == base[3, 5]
    storage.write_box([1, 1], torch.zeros(2, 2))
    assert base[1:3, 1:3].abs().max() == 0 and base[0, 1] == 1


def test_scalars():
    storage = Storage(Buffer("v", (), dt.int32, "var"), poisoned((), dt.int32))
    assert storage.get(storage.prefix) == 0x55555555
    storage.raw[storage.prefix] = storage.bits_of(-3)
    assert storage.get(storage.prefix) == -3


def test_one_copy_per_lane():
    storage = Storage(buffer_of((4,), dt.float32), torch.zeros(2, 3, 4), lanes=(2, 3))
    lane = torch.arange(6.0).reshape(2, 3)
    storage.raw[(*storage.prefix, 1)] = lane
    assert storage.shape == (4,)
    assert torch.equal(storage.get((*storage.prefix, 1)), lane)
    assert torch.equal(storage.tensor[..., 0], torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", dt.ALL, ids=str)
def test_poison_is_recognisable(dtype):
    tensor = poisoned((3, 2), dtype)
    assert tensor.dtype == dtype.as_torch() and tensor.shape == (3, 2)
    if dtype.is_float:
        assert tensor.double().isnan().all()
    elif dtype.is_integer:
        assert set(tensor.to(torch.int64).flatten().tolist()) == {int("55" * dtype.itemsize, 16)}


def test_lane_ids_broadcast():
    ids = lane_ids((2, 3), after=1)
    assert [tuple(i.shape) for i in ids] == [(2, 1, 1), (3, 1)]


def test_inside():
    assert inside(3, 4) and not inside(4, 4) and not inside(-1, 4)
    assert inside(torch.arange(4), 4) is True
    assert inside(torch.tensor([-1, 0, 4]), 4).tolist() == [False, True, False]
    assert inside(torch.tensor(4), 4) is False
    assert math.isnan(poisoned((), dt.float32).item())
