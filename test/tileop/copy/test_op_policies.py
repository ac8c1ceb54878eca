# SPDX-License-Identifier: Apache-2.0
"""eviction_policy of copies and loops: how a GPU's caches keep what is read, in the text of every kind of read."""

from __future__ import annotations

import random
import re

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

POLICIES = "no_allocate", "evict_first", "evict_last"
KINDS = "copy", "loop", "backwards", "async", "gather", "pipelined"
DTYPES = torch.float32, torch.float16, torch.int8, torch.float64, torch.float8_e4m3fn, torch.bool
COLUMNS = 64


def reading(kind, policy, dtype, rows=None):
    """Copy x to y, 64 rows a block. Numbers of `rows` known only at run time are guarded."""
    sizes = rows or T.dynamic("rows"), COLUMNS

    @T.prim_func
    def kernel(x: T.Tensor(sizes, dtype), y: T.Tensor(sizes, dtype)):
        with T.Kernel(T.ceildiv(sizes[0], 64), threads=64) as block:
            tile = T.alloc_fragment((64, COLUMNS), dtype)
            if kind == "copy":
                T.copy(x[block * 64, 0], tile, eviction_policy=policy)
            elif kind == "loop":
                for i, j in T.Parallel(64, COLUMNS, eviction_policy=policy):
                    tile[i, j] = x[block * 64 + i, j]
            elif kind == "backwards":  # no neighbours: one element each
                for i, j in T.Parallel(64, COLUMNS, eviction_policy=policy):
                    tile[i, COLUMNS - 1 - j] = x[block * 64 + i, COLUMNS - 1 - j]
            elif kind == "async":
                shared = T.alloc_shared((64, COLUMNS), dtype)
                T.async_copy(x[block * 64, 0], shared, eviction_policy=policy)
                T.ptx_wait_group(0)
                T.sync_threads()
                T.copy(shared, tile)
            elif kind == "gather":
                shared = T.alloc_shared((64, COLUMNS), dtype)
                for i, j in T.Parallel(64, COLUMNS, asynchronous=True, eviction_policy=policy):
                    shared[i, j] = x[block * 64 + i, j]
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.sync_threads()
                T.copy(shared, tile)
            else:
                for part in T.Pipelined(2, num_stages=2):
                    shared = T.alloc_shared((64, COLUMNS // 2), dtype)
                    T.copy(x[block * 64, part * (COLUMNS // 2)], shared, eviction_policy=policy, disable_tma=True)
                    T.copy(shared, y[block * 64, part * (COLUMNS // 2)])
            if kind != "pipelined":
                T.copy(tile, y[block * 64, 0])

    return kernel


def reads_of_x(text):
    """Return the calls that read x, with the template arguments, and its plain elements."""
    body = text[text.index('extern "C" __global__') :]
    return re.findall(r"tile::(\w+)<([^()]*)>\([^;]*?\bx \+|tile::(load)<([^()]*)>\(&x\[", body), re.findall(
        r"(?<!&)\bx\[", body
    )


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, way, seed):
    draw = random.Random(seed)
    for policy in POLICIES:
        x = (torch.randn(draw.randint(1, 150), COLUMNS) * 9).to(draw.choice(DTYPES))
        y = torch.zeros_like(x)
        way(reading(kind, policy, x.dtype), x, y)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), (policy, x.shape, x.dtype)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("rows", [128, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [*POLICIES, "evict_normal"])
def test_every_read_has_the_policy(policy, kind, rows, target):
    for dtype in DTYPES:
        compiled = torch_tile.compile(reading(kind, policy, dtype, rows), target=target)
        calls, plain = reads_of_x(compiled.get_kernel_source())
        assert calls or (plain and policy == "evict_normal"), "nothing reads x"
        for name, options, single, of_single in calls:
            line = f"tile::Line::{policy}" in (options or of_single)
            # cp.async of 16 bytes takes no room in the first level anyway.
            wanted = policy != "evict_normal" and not (policy == "no_allocate" and name == "cp_async")
            assert line == wanted, (name or single, options, dtype)
            assert name != "cp_async" or policy == "evict_normal" or options.startswith("16")
        assert not plain or policy == "evict_normal"


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_120a"])
def test_the_assembler_takes_them(chip):
    for kind in ("copy", "backwards", "async"):
        for policy in POLICIES:
            for dtype in DTYPES if policy == "evict_first" else DTYPES[:1]:
                compiled = torch_tile.compile(reading(kind, policy, dtype), target=f"cuda:{chip}")
                assert all(not r.spills for r in compiled.resources.values())


def test_what_has_no_policy_is_reported():
    """Stores, and copies on chip. Bulk copies have those of the second level, and take no room in the first."""

    def kernel(policy, back):
        @T.prim_func
        def kernel(x: T.Tensor((64, 64), "float16"), y: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128) as _:
                tile, full = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(1)
                T.tma_copy(x, tile, barrier=full, eviction_policy=policy)
                if T.get_thread_binding() == 0:
                    T.mbarrier_arrive(full)
                T.mbarrier_wait_parity(full, 0)
                T.copy(tile, y, eviction_policy=policy if back else None)

        return torch_tile.compile(kernel, target="cuda:sm_90a")

    for policy in POLICIES:
        assert "`tile` is no tensor" in str(kernel(policy, True).schedule)
        compiled = kernel(policy, False)
        assert "is no tensor" not in str(compiled.schedule)
        name = "tma_load" if policy == "no_allocate" else f"tma_load_{policy}"
        assert f"tile::{name}(" in compiled.get_kernel_source()


def test_unknown_policies_are_refused():
    for statement in ("copy", "loop"):
        with pytest.raises(TileError, match="did you mean 'no_allocate'"):
            reading(statement, "no_alocate", torch.float32)
