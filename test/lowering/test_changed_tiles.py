# SPDX-License-Identifier: Apache-2.0
"""Kernels with a warp that copies, whose other threads change what it brought before products read it."""

import re
import sys
from pathlib import Path

import pytest

import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Role
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.copy.op import Copy

sys.path.insert(0, str(Path(__file__).parent))
from role_oracle import same_reads

H, F = T.float16, T.float32


@T.macro
def clear_from(tile, first):
    for i, j in T.Parallel(*tile.shape):
        if i >= first:
            tile[i, j] = 0


def cleared():
    """Rows of both operands are zeros from one on, in every step."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            a, b, c = T.alloc_shared((64, 128), H), T.alloc_shared((64, 128), H), T.alloc_fragment((128, 128), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[ko * 64, by * 128], a)
                T.copy(B[ko * 64, bx * 128], b)
                clear_from(a, ko)
                clear_from(b, ko)
                T.gemm(a, b, c, transpose_A=True)
            T.copy(c, C[by * 128, bx * 128])

    return kernel


def rest():
    """What is left behind whole steps comes under a condition, iteration after iteration."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((4, 512, 512), H)):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            a, b, c = T.alloc_shared((64, 128), H), T.alloc_shared((64, 128), H), T.alloc_fragment((128, 128), F)
            a_last, b_last = T.alloc_shared((64, 128), H), T.alloc_shared((64, 128), H)
            for turn in T.serial(4):
                T.clear(c)
                end = turn * 100 + bx * 32
                for ko in T.Pipelined(end // 64, num_stages=2):
                    T.copy(A[ko * 64, by * 128], a)
                    T.copy(B[ko * 64, bx * 128], b)
                    T.gemm(a, b, c, transpose_A=True)
                if end % 64 > 0:
                    T.copy(A[end // 64 * 64, by * 128], a_last)
                    T.copy(B[end // 64 * 64, bx * 128], b_last)
                    clear_from(a_last, end % 64)
                    clear_from(b_last, end % 64)
                    T.gemm(a_last, b_last, c, transpose_A=True)
                T.copy(c, C[turn, by * 128, bx * 128])

    return kernel


@pytest.mark.parametrize("kernel", [cleared, rest])
def test_threads_write_to_tiles_once_these_are_there(kernel) -> None:
    """Also where the first to touch one only writes to it."""
    made = kernel()
    program = specialize_warps(made.program, Build(Target.of("cuda:sm_90a"), PassOptions()))
    for block in ((1, 2), (0, 1), (2, 0)):
        names = lambda k, block=block: dict(zip(k.blocks, block, strict=True))  # noqa: E731
        same_reads(made.program.kernels[0], program.kernels[0], names, None, range(6))
    reading, _ = (s for s in program.kernels[0].body.stmts if isinstance(s, Role))
    assert not any(isinstance(n, Copy) and n.dst.buffer.scope == "shared" for n in walk(reading))
    lines = [line.strip() for line in str(reading).splitlines()]
    writes = [n for n, line in enumerate(lines) if re.match(r"[ab](_last)?\[.*\] = ", line)]
    waits = [n for n, line in enumerate(lines) if "mbarrier_wait" in line and "full" in line]
    assert writes and waits and writes[0] > waits[0 if kernel is cleared else 1]
