# SPDX-License-Identifier: Apache-2.0
"""Kernels whose warps have roles, from the author's text to a cubin: every stage, and what it becomes in the end."""

import linecache
import re

import pytest

import torch_tile.language as T
from torch_tile.build import Build
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.ir.node import alike
from torch_tile.ir.verify import verify
from torch_tile.lowering import cuda_passes
from torch_tile.lowering.simplify_program import simplify_program
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.target import Target


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


def trace(text):
    """The program that printed text says."""
    name = f"<hopper {len(linecache.cache)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"T": T}
    exec(compile(text, name, "exec"), scope)
    return next(f.program for f in scope.values() if isinstance(f, T.PrimFunc))


def stages(program, build):
    for step, stage in cuda_passes(build):
        new = step(program)
        verify(new, stage)
        if new is not program:
            yield step.__name__, new
        program = new


KERNELS = {"gemm": gemm.program, "two_products": two_products.program}


@pytest.mark.parametrize("name", KERNELS)
def test_every_stage_traces_back(name):
    found = dict(stages(KERNELS[name], Build(Target.of("cuda:sm_90a"))))
    assert {"split_warps", "infer_layouts", "place_shared", "init_barriers", "flatten"} <= set(found)
    for step, program in found.items():
        text = repr(program)
        back = trace(text)  # tracing computes with literals at once
        assert alike(simplify_program(back), simplify_program(program)), f"after {step}:\n{text}"
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
