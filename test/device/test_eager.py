# SPDX-License-Identifier: Apache-2.0
"""Ops called again on a GPU: what is replayed computes what the first call did, on any stream, in CUDA graphs."""

import pytest
import torch

from torch_tile.ops import eager

pytestmark = pytest.mark.cuda

OPS = torch.ops.tile
HALF = torch.bfloat16


def half(*shape):
    return torch.randn(shape, device="cuda").to(HALF)


def paged():
    table = torch.randperm(40, device="cuda", dtype=torch.int32).view(4, 10)
    lengths = torch.randint(1, 640, (4,), device="cuda", dtype=torch.int32)
    return half(4, 1, 128, 512), half(4, 1, 128, 64), half(40, 64, 512), half(40, 64, 64), table, lengths


def words():
    return torch.randint(0, 255, (256, 128), device="cuda", dtype=torch.uint8)


def add(a, b, x):
    return OPS.gemm(a, [b.mT], [x], "t", "v0=add(acc0,x0);ret v0", HALF)


def dequant(a, b, scale):
    return OPS.dequant_gemm(a, [b], [scale], [], 4, False, 8, [], "", "", HALF)


def ends():
    return torch.tensor([5, 40, 96], device="cuda", dtype=torch.int32)


def experts(a, b, offsets):
    return OPS.grouped_gemm(a, [b.mT], offsets, [], "", "", HALF)


def causal(q, k, v):
    return OPS.attention(q, k, v, None, True)


CALLS = {
    "gemm": (add, lambda: (half(96, 256), half(128, 256), half(96, 128))),
    "one row": (add, lambda: (half(1, 256), half(128, 256), half(1, 128))),
    "grouped_gemm": (experts, lambda: (half(96, 256), half(3, 128, 256), ends())),
    "dequant_gemm": (dequant, lambda: (half(16, 256), words(), half(256, 4) / 64)),
    "swiglu": (OPS.swiglu, lambda: (half(2, 32, 256), half(128, 256), half(128, 256))),
    "attention": (causal, lambda: [half(2, 4, 200, 128) for _ in range(3)]),
    "decoding": (OPS.attention, lambda: (half(1, 32, 1, 128), half(1, 8, 4096, 128), half(1, 8, 4096, 128))),
    "mla_decode": (OPS.mla_decode, paged),
    "rms_norm": (OPS.rms_norm, lambda: (half(33, 1024), half(1024))),
    "add_rms_norm": (OPS.add_rms_norm, lambda: (half(33, 1024), half(33, 1024), half(1024))),
    "softmax": (OPS.softmax, lambda: (half(5, 7, 300),)),
}


@pytest.fixture(autouse=True)
def nothing_is_known():
    """Forms that other tests met, and these."""
    eager.forget()
    yield
    eager.forget()


def same(got, want):
    for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def poison():
    """Freed memory holds NaN, so that what a kernel does not write is seen."""
    torch.full((64 * 2**20,), float("nan"), device="cuda")


@pytest.mark.parametrize(("call", "make"), CALLS.values(), ids=CALLS)
def test_replayed_calls(call, make, long_ways):
    problems = [make() for _ in range(6)]
    with torch.no_grad():
        wanted = []
        for args in problems:
            eager.forget()
            wanted.append(call(*args))
        eager.forget()
        long_ways.clear()
        for args, want in zip(problems, wanted, strict=True):
            poison()
            same(call(*args), want)
    assert len(long_ways) == 1  # the second call is watched, the others are replayed


@pytest.mark.parametrize(("call", "make"), CALLS.values(), ids=CALLS)
def test_in_a_cuda_graph(call, make):
    static, new = make(), make()
    with torch.no_grad():
        want = call(*new)
        for _ in range(3):
            call(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(*static)
        for old, value in zip(static, new, strict=True):
            old.copy_(value)
        graph.replay()
    same(got, want)


def test_the_current_stream():
    x, w = half(64, 1024), half(1024)
    with torch.no_grad():
        for _ in range(4):
            want = OPS.rms_norm(x, w)
        side, busy, late = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda"), torch.empty_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(8):
                busy = busy @ busy * 1e-3
            late.copy_(x)  # a call that did not wait for this would read something else
            got = OPS.rms_norm(late, w)
        torch.cuda.synchronize()
    same(got, want)


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for turn in range(8):
        with torch.cuda.device(turn // 2 % 2):
            x = torch.randn(33, 1024, device=f"cuda:{turn % 2}")
            got = OPS.rms_norm(x)
        assert got.device == x.device
        torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (1024,), eps=1e-6), rtol=1e-4, atol=1e-4)
