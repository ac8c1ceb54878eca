# SPDX-License-Identifier: Apache-2.0
"""Products under way: which results each wait completes."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike, walk
from torch_tile.ir.stmt import Block, Do, For, If, Role
from torch_tile.language.products import pin_results
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma_results import WgmmaResults


def kernel_of(body, threads=128):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), n: T.int32):
        with T.Kernel(1, threads=threads) as _:
            a = T.alloc_shared((64, 64), "float16")
            T.copy(A, a)
            c = T.alloc_fragment((64, 64), "float32")
            d = T.alloc_fragment((64, 64), "float32")
            e = T.alloc_fragment((64, 64), "float32")
            body(a, {"c": c, "d": d, "e": e}, n)

    return kernel


def order(kernel):
    """Waits and results in the order of the text, as `2: c d`; loops in brackets."""

    def text(node):
        if isinstance(node, WgmmaResults):
            return [node.C.buffer.name]
        if isinstance(node, Do) and node.call.name == "wgmma_wait":
            return [f"{node.call.options[0]}:"]
        if isinstance(node, For):
            return ["[", *text(node.body), "]"]
        if isinstance(node, Block):
            return [word for s in node.stmts for word in text(s)]
        if isinstance(node, If):
            return text(node.then) + text(node.otherwise)
        return text(node.body) if isinstance(node, Role) else []

    return " ".join(text(kernel.program.kernels[0].body))


def start(a, c):
    T.wgmma_gemm(a, a, c)


def straight(a, f, n):
    start(a, f["c"])
    start(a, f["d"])
    start(a, f["c"])
    T.wait_wgmma(2)  # of c two, one is under way
    T.wait_wgmma(1)
    start(a, f["e"])
    T.wait_wgmma(1)
    T.wait_wgmma()
    T.wait_wgmma(0)


def deferred(a, f, n):
    for _ in T.serial(n):
        start(a, f["c"])
        T.wait_wgmma(1)
    T.wait_wgmma(0)


def across_turns(a, f, n):
    for _ in T.serial(n):
        start(a, f["c"])
        T.wait_wgmma(1)
        start(a, f["d"])
    T.wait_wgmma(0)


@T.macro
def branches(a, f, n):
    start(a, f["c"])
    if n > 3:
        start(a, f["d"])
    else:
        start(a, f["e"])
    T.wait_wgmma(1)
    T.wait_wgmma(0)


def inner_loops(a, f, n):
    for _ in T.serial(n):
        for _ in T.serial(n):
            start(a, f["c"])
        T.wait_wgmma(1)  # of d, if the inner loop did not run
        start(a, f["d"])
    T.wait_wgmma(0)


def synchronous(a, f, n):
    start(a, f["c"])
    T.gemm(a, a, f["d"])
    T.wait_wgmma(0)


ORDERS = {
    straight: "2: 1: d 1: c 0: e 0:",
    deferred: "[ 1: ] 0: c",
    across_turns: "[ 1: d ] 0: c d",
    branches: "1: c 0: d e",
    inner_loops: "[ [ ] 1: ] 0: c d",
    synchronous: "0: c",
}


@pytest.mark.parametrize("body", ORDERS, ids=lambda f: getattr(f, "__name__", "branches"))
def test_waits_complete_what_is_old_enough(body):
    kernel = kernel_of(body)
    assert order(kernel) == ORDERS[body]
    block = kernel.program.kernels[0].body
    assert alike(pin_results(block), block)  # once is enough


def test_a_role_waits_for_its_own_products():
    def roles(a, f, n):
        with T.ws(0):
            start(a, f["c"])
            T.wait_wgmma(0)
        with T.ws(1):
            start(a, f["d"])
            T.wait_wgmma(0)

    assert order(kernel_of(roles, threads=256)) == "0: c 0: d"


def test_a_kernel_without_waits_stays_as_it_is():
    body = kernel_of(lambda a, f, n: T.gemm(a, a, f["c"])).program.kernels[0].body
    assert pin_results(body) is body


def test_what_is_recorded():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.wgmma_gemm(a, a, c, transpose_B=True, clear_accum=True)

    (op,) = (n for n in walk(kernel.program) if isinstance(n, Gemm))
    assert (op.wg_wait, op.wgmma, op.transpose_A, op.transpose_B, op.clear_accum) == (-1, True, False, True, True)
    assert "T.gemm(a, a, c, transpose_B=True, clear_accum=True, wg_wait=-1, wgmma=True)" in repr(kernel)


@pytest.mark.parametrize("pending", [-1, 8, 1.5, "all"])
def test_wrong_waits(pending):
    with pytest.raises(TileError) as caught:
        kernel_of(lambda a, f, n: T.wait_wgmma(pending))
    assert caught.value.code == "bad_argument" and "`pending`" in str(caught.value)


def test_values_are_those_of_a_product_at_once():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.wgmma_gemm(a, a, c, clear_accum=True)
            T.wait_wgmma(0)
            T.copy(c, C)

    x = torch.randn(64, 64).half()
    want = x.float() @ x.float()
    for run in (lambda y: evaluate(kernel, x, y), lambda y: torch_tile.compile(kernel, target="cpu")(x, y)):
        y = torch.empty(64, 64)
        run(y)
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
