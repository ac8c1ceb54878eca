# SPDX-License-Identifier: Apache-2.0
"""Kernels that order warps by hand, and cannot be made so."""

import pytest

import torch_tile
import torch_tile.language as T


def for_all_threads():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_fragment((64,), "float32")
            for k in T.serial(4):
                T.copy(A, tile)  # here
                with T.ws(0):
                    A[k] = 1.0


def in_parallel():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            for k in T.Parallel(4):  # here
                with T.ws(0):
                    A[k] = 1.0


def other_warps():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            with T.ws(0):
                A[0] = 1.0
            with T.ws(0, 1):  # here
                A[1] = 1.0


def fragment_of_all():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            c = T.alloc_fragment((64,), "float32")
            T.clear(c)  # here
            with T.ws(0):
                T.copy(c, A)


def fragment_of_two_turns():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            c = T.alloc_fragment((64,), "float32")
            with T.ws(0):
                T.clear(c)
            T.sync_threads()
            with T.ws(0):  # here
                T.copy(c, A)


def nested_roles():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _, T.ws(0, 1), T.ws(0):  # here
            A[0] = 1.0


def registers_in_a_branch():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=256) as b, T.ws(0):
            if b > 0:
                T.set_max_nreg(240, 1)  # here
            A[b] = 1.0


def registers_said_twice():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=256) as b, T.ws(0):
            T.inc_max_nreg(240)
            A[b] = 1.0
            T.dec_max_nreg(24)  # here


def more_registers_than_there_are():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=384) as b:
            with T.ws(0, 1):  # here
                T.inc_max_nreg(240)
                A[b] = 1.0
            with T.ws(2):
                A[b + 8] = 2.0

    torch_tile.compile(kernel, target="cuda:sm_90a")


def registers_of_two_warpgroups_at_once():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=256) as b:
            with T.ws(0):
                T.inc_max_nreg(232)
                A[b] = 1.0
            with T.ws(1):
                T.dec_max_nreg(24)
                A[b + 8] = 1.0
            T.sync_threads()
            with T.ws(0, 1):  # here
                T.set_max_nreg(128, 1)
                A[b + 16] = 2.0

    torch_tile.compile(kernel, target="cuda:sm_90a")


def product(dtype="float16", rows=64, target="cuda:sm_90a"):
    accum = "float64" if dtype == "float64" else "float32"

    def case():
        @T.prim_func
        def kernel(A: T.Tensor((rows, 64), dtype), C: T.Tensor((rows, rows), accum)):
            with T.Kernel(1, threads=128) as _:
                a = T.alloc_shared((rows, 64), dtype)
                c = T.alloc_fragment((rows, rows), accum)
                T.copy(A, a)
                T.wgmma_gemm(a, a, c, transpose_B=True, clear_accum=True)  # here
                T.wait_wgmma(0)
                T.copy(c, C)

        torch_tile.compile(kernel, target=target)

    return case


def clusters_in_roles():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=256, cluster_dims=2) as _, T.ws(0):
            T.cluster_sync()  # here


def orders_in_parallel():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            ready = T.alloc_barrier(128)
            for i in T.Parallel(64):
                A[i] = 1.0
                T.mbarrier_arrive(ready)  # here

    torch_tile.compile(kernel, target="cuda:sm_90a")


def too_many_numbers():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((64,), "float32")
            with T.ws(0):  # here
                for n in list(range(1, 16)):
                    T.sync_threads(n, 128)
                T.copy(A, tile)
                for i in T.Parallel(64):
                    B[i] = tile[63 - i]

    torch_tile.compile(kernel, target="cuda:sm_90a")


WGMMA = "T.wgmma_gemm(a, a, c, transpose_B=True, clear_accum=True)"
CASES = {
    for_all_threads: ("mixed_roles", "T.copy(A, tile)"),
    in_parallel: ("mixed_roles", "for k in T.Parallel(4):"),
    other_warps: ("mixed_roles", "T.ws(0, 1)"),
    fragment_of_all: ("mixed_roles", "T.clear(c)"),
    fragment_of_two_turns: ("mixed_roles", "T.ws(0)"),
    nested_roles: ("not_outermost", "T.ws(0)"),
    registers_in_a_branch: ("bad_argument", "T.set_max_nreg(240, 1)"),
    registers_said_twice: ("bad_argument", "T.dec_max_nreg(24)"),
    more_registers_than_there_are: ("registers_of_roles", "T.ws(0, 1)"),
    registers_of_two_warpgroups_at_once: ("bad_argument", "T.ws(0, 1)"),
    clusters_in_roles: ("not_outermost", "T.cluster_sync()"),
    orders_in_parallel: ("not_in_parallel", "T.mbarrier_arrive(ready)"),
    too_many_numbers: ("bad_argument", "T.ws(0)"),
    product("float32", 16): ("no_wgmma", WGMMA),
    product("float64"): ("no_wgmma", WGMMA),
    product(target="cuda:sm_80"): ("no_wgmma", WGMMA),
    product(target="cuda:sm_100a"): ("no_wgmma", WGMMA),
}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_refused(number, refused):
    case, (code, text) = list(CASES.items())[number]
    where = refused if case.__name__ != "case" else of_product
    where(case, code, text)


def of_product(case, code, text):
    with pytest.raises(torch_tile.TileError) as caught:
        case()
    assert caught.value.code == code, str(caught.value)
    source = caught.value.span.source()
    assert source.endswith("# here") and source[caught.value.span.column : caught.value.span.end_column] == text
