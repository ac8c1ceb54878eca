# SPDX-License-Identifier: Apache-2.0
"""Kernels whose warps have roles, from the author's text to a cubin: every stage, and what it becomes in the end."""

import re

import pytest
from traced_stages import stages, traces_back

import torch_tile
import torch_tile.language as T
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin


@T.prim_func
def gemm(A: T.Tensor((512, 256), "bfloat16"), B: T.Tensor((512, 256), "bfloat16"), C: T.Tensor((512, 512), "bfloat16")):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        a, b = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((128, 64), "bfloat16")
        c = T.alloc_fragment((128, 128), "float32")
        T.clear(c)
        for k in T.Pipelined(4, num_stages=3):
            T.copy(A[by * 128, k * 64], a)
            T.copy(B[bx * 128, k * 64], b)
            T.gemm(a, b, c, transpose_B=True)
        T.copy(c, C[by * 128, bx * 128])


@T.prim_func
def two_products(Q: T.Tensor((256, 64), "float16"), K: T.Tensor((512, 64), "float16"), O: T.Tensor((256, 64))):
    """As in attention: the first product, changed, is an operand of the second."""
    with T.Kernel(2, threads=256) as bx:
        q, k = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
        s, p = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float16")
        o = T.alloc_fragment((128, 64), "float32")
        T.copy(Q[bx * 128, 0], q)
        T.clear(o)
        for i in T.Pipelined(8, num_stages=2):
            T.copy(K[i * 64, 0], k)
            T.gemm(q, k, s, transpose_B=True, clear_accum=True)
            for r, c in T.Parallel(128, 64):
                p[r, c] = T.exp2(s[r, c])
            T.gemm(p, k, o)
        T.copy(o, O[bx * 128, 0])


KERNELS = {"gemm": gemm.program, "two_products": two_products.program}


@pytest.mark.parametrize("name", KERNELS)
def test_every_stage_traces_back(name):
    found = dict(stages(KERNELS[name], Build(Target.of("cuda:sm_90a"))))
    assert {"specialize_warps", "infer_layouts", "allocate_shared", "init_mbarriers", "flatten"} <= set(found)
    for step, program in found.items():
        traces_back(step, program)
    text = repr(program)
    assert "with T.role(" in text and "T.tensor_map(" in text and "T.alloc_barrier(" in text


@pytest.mark.parametrize("name", KERNELS)
def test_the_assembler_has_no_advice(name):
    """No product is serialised, nothing is spilled, and each barrier that is waited for is made."""
    program, build = KERNELS[name], Build(Target.of("cuda:sm_90a"))
    *_, (_, flat) = stages(program, build)
    source = emit_cuda(flat, build, program)
    cubin = compile_cubin(source.text, build.target)
    assert cubin.warnings == []
    assert [(used.spills, used.stack) for used in cubin.resources.values()] == [(0, 0)]
    waited = set(re.findall(r"mbarrier_wait\((\w+)", source.text))
    assert waited and waited == set(re.findall(r"mbarrier_init<\d+>\((\w+)", source.text))
    (entry,) = source.entries
    assert entry.kinds == "PMM" and source.text.count("__grid_constant__") == 2


def test_sums_that_are_stored_as_they_are_stay_in_their_registers():
    """Packets of two are moved as floats: as integers, NVVM would keep the sums so and move them beside products that
    are in flight, which the assembler notes (C7517, C7519) and gets wrong.
    """

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 512), "bfloat16"), B: T.Tensor((64, 128), "bfloat16"), C: T.Tensor((512, 128), "float32"),
        first: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as _:
            for t in T.serial(4):
                c = T.alloc_fragment((128, 128), "float32")
                T.clear(c)
                a, b, d = (T.alloc_shared((16, 128), "bfloat16") for _ in range(3))
                for _ in T.serial(t + 1):
                    for k in T.Pipelined(first % 4, 4, num_stages=4):
                        T.copy(B[k * 16, 0], b)
                        T.copy(A[k * 16, t * 128], a)
                        T.gemm(a, b, c, transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                        T.copy(B[k * 16, 0], d)
                        T.gemm(a, d, c, transpose_A=True)
                out = T.alloc_shared((128, 128), "float32")
                T.copy(c, out)
                T.copy(out, C[t * 128, 0])

    assert not torch_tile.compile(kernel, target="cuda:sm_90a").cubin.warnings
