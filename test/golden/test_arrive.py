# SPDX-License-Identifier: Apache-2.0
"""Blocks that leave parts for the last of them to join: what they become, and that all that orders them is needed."""

import re

import joined_last
import pytest
import torch
from expecttest import assert_expected_inline
from mutation import removals
from traced_stages import stages, traces_back

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.simulator.interpret import interpret

HOPPER, AMPERE = Target.of("cuda:sm_90a"), Target.of("cuda:sm_80")


def cpu_block(kernel):
    """The C++ function of one block, without the author's lines."""
    source = re.sub("  // test_arrive.py.*", "", torch_tile.compile(kernel).get_kernel_source())
    return source[source.index("static") : source.index('\n\nextern "C"')]


def test_what_an_arrival_becomes():
    @T.prim_func
    def kernel(parts: T.Tensor((4, 32), "float32"), counter: T.Tensor((1,), "int32"), out: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as b:
            T.fill(parts[b, :], 1.0)
            if T.arrive_last(counter[0], 4):
                T.copy(parts[3, 0:32], out)

    assert_expected_inline(
        repr(lower(kernel.program, cuda_passes(Build(AMPERE)))),
        """\
@T.prim_func
def kernel(parts: T.Tensor((128,), T.float32), counter: T.Tensor((1,), T.int32), out: T.Tensor((32,), T.float32)):
    with T.Kernel(4, threads=32, shared_bytes=4) as b:
        thread = T.thread_index()
        parts[b * 32 + thread] = 1.0
        arrived_last = T.alloc_shared((1,), T.int32, offset=0)
        T.evaluate(T.call("barrier", dtype=T.int32))
        if thread == 0:
            arrived_last[0] = T.call("arrive_last", T.address_of(counter[0]), 4, dtype=T.int32)
        T.evaluate(T.call("barrier", dtype=T.int32))
        if arrived_last[0] != 0:
            out[thread] = parts[thread + 96]""",
    )
    assert_expected_inline(
        cpu_block(kernel),
        """\
static int64_t block_0(float* parts, int32_t* counter, float* out, char* arena, int64_t b) {
  #pragma omp simd
  for (int64_t i = 0; i < 32; ++i) {
    parts[b * 32 + i] = 1.0f;
  }
  alignas(64) int32_t arrived_last[1];
  arrived_last[0] = tile::cpu_arrive_last(counter, 4);
  if (arrived_last[0] != 0) {
    #pragma omp simd
    for (int64_t i = 0; i < 32; ++i) {
      out[i] = parts[i + 96];
    }
  }
  return 0;
}""",
    )


def product(m, n, k, splits, **options):
    """A kernel, its arguments, and what it shall give."""
    a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
    counters = torch.zeros(-(-m // options.get("block", (64, 64))[0]), -(-n // options.get("block", (64, 64))[1]))
    args = a, b, torch.full((splits, m, n), float("nan")), counters.int(), torch.full((m, n), float("nan")).half()
    return joined_last.products(m, n, k, splits, **options), args, a.double() @ b.double()


def loops(m, n, k, splits, blocks):
    a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
    counters = torch.zeros(-(-m // 64), -(-n // 64), dtype=torch.int32)
    args = a, b, torch.full((splits, m, n), float("nan")), counters, torch.full((m, n), float("nan")).half()
    return joined_last.tile_after_tile(m, n, k, splits, blocks), args, a.double() @ b.double()


def bulk():
    a, nan = torch.randn(3, 16, 32), float("nan")
    args = a, torch.full((3, 16, 32), nan), torch.zeros(1, dtype=torch.int32), torch.full((16, 32), nan)
    return joined_last.bulk(16, 32, 3), args, 2 * a.double().sum(0)


KERNELS = {
    "product": lambda: product(128, 128, 448, 2),
    "product of tiles in shared memory": lambda: product(64, 128, 640, 3, staged=True),
    "product of two warpgroups": lambda: product(256, 64, 256, 2, block=(128, 64, 64), threads=256),
    "tile after tile": lambda: loops(128, 64, 256, 2, 3),
    "by bulk copies": bulk,
}


def run(program, kernel, args, want):
    """What the thread interpreter finds on fresh results; they must be right if it finds nothing."""
    given = [a.clone() for a in args]
    findings = interpret(program, kernel.program, given)
    if not findings:
        torch.testing.assert_close(given[-1].double(), want, rtol=2e-2, atol=5e-2)
        assert not given[-2].any()
    return findings


@pytest.mark.parametrize("name", KERNELS)
def test_values(name):
    kernel, args, want = KERNELS[name]()
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    assert sum(1 for _ in find(flat, Role)) >= 1
    findings = run(flat, kernel, args, want)
    assert not findings, findings.report()


@pytest.mark.parametrize("name", KERNELS)
def test_the_assembler_has_no_advice(name):
    kernel, _, _ = KERNELS[name]()
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    log = compile_cubin(compiled.get_kernel_source(), HOPPER).log
    assert "C75" not in log and " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log
    assert not compiled.cubin.warnings


@pytest.mark.parametrize("name", KERNELS)
def test_each_stage_traces_back(name):
    kernel, _, _ = KERNELS[name]()
    for step, program in stages(kernel.program, Build(HOPPER)):
        traces_back(step, program)


# What lets the last stages of a loop go lets them go for nobody; and where one thread stores, waits and arrives, it
# needs no other to meet it before.
MAY_STAY = ("warp_arrive", "mbarrier_arrive", "wgmma_fence", "wgmma_wait", "mbarrier_wait")


@pytest.mark.parametrize("name", ["product", "tile after tile", "by bulk copies"])
def test_all_that_orders_blocks_is_needed(name):
    kernel, args, _ = KERNELS[name]()
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    missed = [r for r in removals(flat) if not interpret(r.program, kernel.program, [a.clone() for a in args])]
    wrong = [f"{r.name} {r.number} at {r.span}" for r in missed if not r.name.startswith(MAY_STAY)]
    if name == "by bulk copies":
        wrong = [text for text in wrong if not text.startswith("named_barrier")]
    assert not wrong, f"without {wrong}: nothing found"
    names = {r.name for r in removals(flat)}
    assert "arrive_last" in names and ("bulk_wait, for reads" in names) == (name == "by bulk copies")


def test_who_multiplies_arrives():
    """The producer neither counts nor waits for the others of its block."""
    kernel, _, _ = KERNELS["product"]()
    reading, copying = find(lower(kernel.program, cuda_passes(Build(HOPPER))), Role)
    calls = [[c.name for c in find(role, Call)] for role in (reading, copying)]
    at = calls[0].index("arrive_last")
    assert calls[0][at - 1] == calls[0][at + 1] == "named_barrier" and calls[0].count("arrive_last") == 1
    assert not {"arrive_last", "named_barrier", "barrier"} & set(calls[1])
