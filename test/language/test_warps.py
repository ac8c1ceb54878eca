# SPDX-License-Identifier: Apache-2.0
"""Lanes that tell each other values, thread by thread against NumPy, and what the assembler makes of it."""

import numpy as np
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def on_threads(kernel, target, *args):
    made = tilelang.compile(kernel, target=target)
    findings = made.interpret(*args)
    assert not findings, findings.report()
    assert made.cubin.data[:4] == b"\x7fELF" and not made.cubin.warnings


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(width, dtype, target, seed):
    @T.prim_func
    def kernel(A: T.Tensor((96,), dtype), to: T.Tensor((96,), "int32"), out: T.Tensor((6, 96), dtype)):
        with T.Kernel(1, threads=96):
            tx = T.get_thread_binding()
            x = A[tx]
            out[0, tx] = T.shfl_sync(x, 5, width)
            out[1, tx] = T.shfl_xor(x, 6, width=width)
            out[2, tx] = T.shfl_up(x, 3, width)
            out[3, tx] = T.shfl_down(x, 2, width, mask=0xFFFFFFFF)
            out[4, tx] = T.shfl_sync(x, to[tx], width=width)
            out[5, tx] = T.tvm_warp_shuffle(0xFFFFFFFF, x, to[tx], width, 32)

    a = torch.randint(0, 100, (96,)).to(getattr(torch, dtype))
    to, out = torch.randint(0, width, (96,), dtype=torch.int32), torch.zeros(6, 96, dtype=a.dtype)
    on_threads(kernel, target, a, to, out)
    lane, base = np.arange(96) % width, np.arange(96) // width * width
    sources = [
        base + 5, base + (lane ^ 6), base + np.where(lane >= 3, lane - 3, lane),
        base + np.where(lane + 2 < width, lane + 2, lane), base + to.numpy(), base + to.numpy(),
    ]  # fmt: skip
    assert torch.equal(out, torch.stack([a[s] for s in sources]))


def test_an_exchange_between_other_lanes_leaves_the_own_value():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), out: T.Tensor((2, 32), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            out[0, tx] = T.shfl_xor(A[tx], 16, 8)
            out[1, tx] = T.shfl_xor(0xFFFFFFFF, A[tx], 16)  # the mask in front, as CUDA has it

    a, out = torch.arange(32, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    on_threads(kernel, "cuda:sm_80", a, out)
    assert torch.equal(out, torch.stack([a, a ^ 16]))


def test_spellings_of_tir():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), out: T.Tensor((2, 64), "int32"), lanes: T.Tensor((64,), "uint64")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            out[0, tx] = T.tvm_warp_shuffle_up(0xFFFFFFFF, A[tx], 2, 32, 32)
            out[1, tx] = T.tvm_warp_shuffle_down(0xFFFFFFFF, A[tx], 2, 32, 32)
            lanes[tx] = T.activemask()

    a, out, lanes = torch.arange(64).int(), torch.zeros(2, 64).int(), torch.zeros(64, dtype=torch.uint64)
    on_threads(kernel, "cuda:sm_80", a, out, lanes)
    assert out[0].tolist() == [n if n % 32 < 2 else n - 2 for n in range(64)]
    assert out[1].tolist() == [n if n % 32 > 29 else n + 2 for n in range(64)]
    assert lanes.tolist() == [0xFFFFFFFF] * 64


@pytest.mark.parametrize("target", TARGETS)
def test_votes(target, seed):
    @T.prim_func
    def kernel(A: T.Tensor((128,), "int32"), out: T.Tensor((4, 128), "int32"), bits: T.Tensor((128,), "uint64")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            some = T.any_sync(A[tx] > 0)
            out[0, tx] = some
            out[1, tx] = T.all_sync(A[tx])
            out[2, tx] = T.any_sync(0xFFFFFFFF, A[tx] > 1)
            if some != 0:
                out[3, tx] = T.all_sync(A[tx] >= 0, mask=0xFFFFFFFF)
            bits[tx] = T.ballot(A[tx] > 0)

    a = torch.randint(0, 2, (4, 32), dtype=torch.int32)
    a[0], a[1] = 0, 1
    out, bits = torch.zeros(4, 128, dtype=torch.int32), torch.zeros(128, dtype=torch.uint64)
    on_threads(kernel, target, a.flatten(), out, bits)
    found = out.reshape(4, 4, 32)
    assert torch.equal(found[0] != 0, (a > 0).any(1, keepdim=True).expand(4, 32))
    assert torch.equal(found[1] != 0, (a != 0).all(1, keepdim=True).expand(4, 32))
    assert not found[2].any() and torch.equal(found[3] != 0, found[0] != 0)
    want = (a.long() << torch.arange(32)).sum(1, keepdim=True).expand(4, 32)
    assert torch.equal(bits.reshape(4, 32).long(), want)


@pytest.mark.parametrize("name", ["any_sync", "all_sync", "ballot_sync", "syncthreads_count", "syncthreads_and"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_votes_take_no_floats(name, dtype):
    """CUDA would cut 0.5 to 0, which Python takes for true."""
    vote = getattr(T, name)
    with pytest.raises(TypeError, match="requires an integer or boolean predicate, got " + dtype) as found:

        @T.prim_func
        def kernel(A: T.Tensor((32,), dtype), out: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                out[T.get_thread_binding()] = T.cast(vote(A[T.get_thread_binding()]), "int32")

    assert isinstance(found.value, TileError) and found.value.code == "float_predicate"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_reductions(dtype, target, seed):
    kinds = ["sum", "max", "min"] + (["bitand", "bitor"] if dtype == "int32" else [])

    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), out: T.Tensor((len(kinds), 64), dtype)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for n, kind in enumerate(kinds):
                out[n, tx] = getattr(T, f"warp_reduce_{kind}")(A[tx])

    a = torch.randint(-50, 50, (2, 32)).to(getattr(torch, dtype))
    out = torch.zeros(len(kinds), 64, dtype=a.dtype)
    on_threads(kernel, target, a.flatten(), out)
    folds = {
        "sum": np.add, "max": np.maximum, "min": np.minimum, "bitand": np.bitwise_and, "bitor": np.bitwise_or,
    }  # fmt: skip
    for n, kind in enumerate(kinds):
        want = folds[kind].reduce(a.numpy(), axis=1)
        np.testing.assert_array_equal(out[n].reshape(2, 32).numpy(), np.repeat(want[:, None], 32, 1))


def test_products_of_bytes(way, seed):
    """Of each thread, and of blocks on a CPU."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 16), "int8"), B: T.Tensor((6, 16), "int8"), out: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=32) as b:
            x, y, total = T.alloc_local((16,), "int8"), T.alloc_local((16,), "int8"), T.alloc_local((1,), "int32")
            total[0] = 5
            for k in T.serial(16):
                x[k] = A[b, k]
                y[k] = B[b, k]
            for k in T.serial(4):
                T.dp4a(x[k * 4], y[k * 4], total[0])
            out[b] = total[0]

    a, b = (torch.randint(-128, 128, (6, 16)).to(torch.int8) for _ in range(2))
    out = torch.zeros(6, dtype=torch.int32)
    way(kernel, a, b, out)
    assert torch.equal(out, 5 + (a.int() * b.int()).sum(1, dtype=torch.int32))


def test_for_gpus():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = T.warp_reduce_sum(A[1])

    for run in (lambda: tilelang.compile(kernel, target="cpu"), lambda: evaluate(kernel, torch.zeros(4))):
        with pytest.raises(TileError) as caught:
            run()
        assert caught.value.code == "unsupported_on_target"


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("width", lambda A, x: T.shfl_xor(A[0], 1, width=12)),
        ("mask", lambda A, x: T.shfl_up(A[0], 1, mask=0xFF)),
        ("mask", lambda A, x: T.any_sync(A[0] > 0, 3)),
        ("value", lambda A, x: T.warp_reduce_bitor(A[0])),
        ("a", lambda A, x: T.dp4a(A[0], x[0], x[0])),
        ("c", lambda A, x: T.dp4a(x[0], x[0], A[0])),
    ],
)
def test_wrong_arguments(name, use):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=32):
                x = T.alloc_local((4,), "int8")
                use(A, x)

    assert caught.value.code == "bad_argument" and f"argument `{name}`" in str(caught.value)


def in_a_nest():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                A[i] = T.shfl_xor(A[i], 1)  # here


def behind_and():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            if n > 0 and T.any_sync(A[tx] > 0) != 0:  # here
                A[tx] = 0


@pytest.mark.parametrize(
    ("case", "text"), [(in_a_nest, "T.shfl_xor(A[i], 1)"), (behind_and, "T.any_sync(A[tx] > 0)")]
)  # fmt: skip
def test_exchanges_that_not_all_lanes_make(case, text, refused):
    refused(case, "bad_argument", text)


def test_a_part_of_a_warp_is_found():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            if tx < 10:
                A[tx] = T.shfl_xor(A[tx], 1)

    with pytest.raises(TileError, match="parted_warp"):
        tilelang.compile(kernel, target="cuda:sm_80")
