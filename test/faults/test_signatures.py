# SPDX-License-Identifier: Apache-2.0
"""Keywords that no operation has: each is an error that names the nearest parameter, and nothing swallows it."""

import inspect
from types import FunctionType

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

# What takes any number of operands; Python lists them where they stand.
VARIADIC = {
    "Kernel": "sizes of the grid", "ClusterKernel": "sizes of the grid", "Parallel": "extents", "parallel": "extents",
    "grid": "extents", "empty": "sizes", "max": "values", "min": "values", "annotate_restrict_buffers": "tensors",
    "call": "operands", "tvm_thread_allreduce": "thread indices", "ws": "numbers of warpgroups",
    "WarpSpecialize": "numbers of warpgroups", "access_ptr": "extents", "call_extern": "arguments",
    "call_pure_extern": "arguments", "ptx": "operands", "CUDASourceCodeKernel": "sizes of the grid",
    "create_list_of_mbarrier": "arrivals", "create_tma_descriptor": "numbers", "tma_load": "coordinates",
}  # fmt: skip
CLASSES = ("Kernel", "ClusterKernel", "PersistentTileScheduler")
DECORATORS = ("macro", "prim_func")
PUBLIC = sorted(
    name
    for name, value in vars(T).items()
    if name in CLASSES
    or (isinstance(value, FunctionType) and not name.startswith("_"))
    or (name.startswith("__") and not name.endswith("__") and callable(value))
)


def kernel_of(compute):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            compute()

    return kernel


def test_all_functions_are_looked_at():
    assert {"copy", "gemm", "reduce_max", "exp", "__exp", "atomic_add", "serial", "Pipelined", "cast"} <= {*PUBLIC}
    assert len(PUBLIC) > 200


@pytest.mark.every_sample
@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_listed(name):
    given = inspect.signature(getattr(T, name)).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in given)
    assert any(p.kind is p.VAR_POSITIONAL for p in given) == (name in VARIADIC)
    assert inspect.getdoc(getattr(T, name))


@pytest.mark.every_sample
@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in DECORATORS])
def test_misspelt_keywords_are_refused(name):
    function = getattr(T, name)
    given = inspect.signature(function).parameters.values()
    known = [p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in known or ["no_such_keyword"]:
        wrong = parameter + parameter[-1]
        with pytest.raises(TileError) as caught:
            kernel_of(lambda wrong=wrong: function(**{wrong: None}))
        assert caught.value.code == "unknown_keyword", str(caught.value)
        assert f"`{wrong}`" in str(caught.value)
        assert not known or f"did you mean `{parameter}`?" in str(caught.value)
        assert caught.value.span is not None


def test_outside_kernels():
    for call, near in (
        (lambda: T.dynamic("m", multple_of=16), "multiple_of"),
        (lambda: T.Tensor((4,), dtyp="float16"), "dtype"),
        (lambda: T.Layout((4,), forward=lambda i: i), "forward_fn"),
        (lambda: torch_tile.jit(out_ids=[1])(lambda: None), "out_idx"),
    ):
        with pytest.raises(TileError, match=near):
            call()
    for decorator in DECORATORS:
        with pytest.raises(TypeError, match="eager"):
            getattr(T, decorator)(eager=True)


def refused(compute, text):
    with pytest.raises(TileError, match=text):
        kernel_of(compute)


def test_hints_are_checked_by_their_values():
    """What would change a result, or is no value of the hint."""

    def tiles():
        return (T.alloc_shared((16, 16), "float16") for _ in range(2))

    refused(lambda: T.copy(*tiles(), eviction_policy="evict_frist"), "did you mean 'evict_first'")
    refused(lambda: T.copy(*tiles(), prefer_instruction="cp_asinc"), "did you mean 'cp_async'")
    refused(lambda: T.gemm(*tiles(), T.alloc_fragment((16, 16)), mbar=T.alloc_barrier(1)), "sm_100 only")
    refused(
        lambda: T.gemm(*tiles(), T.alloc_fragment((16, 16)), policy="FullRow"), "give one of T.GemmWarpPolicy.Square"
    )
    refused(lambda: T.use_swizzle(8, order="colum"), "did you mean 'column'")
    refused(lambda: T.tma_copy(*tiles(), cluster_mask=3), "given for a store")
    refused(lambda: T.tma_copy(*tiles(), T.alloc_barrier(1), cluster_mask=3), "3 in a cluster of 1 block$|of 1 block ")
    refused(lambda: T.tma_copy(*tiles(), leader_scope_threads=16), "one starts the copy")
    refused(lambda: T.sync_threads(T.get_thread_binding() % 4, 128), "computed, .* a branch for each")
    refused(lambda: T.alloc_reducer((4,), replication="al"), "did you mean 'all'")
    refused(lambda: T.print(1, warp_id=1), "a block prints once")
    refused(lambda: T.cast(1.0, "float16", round="up"), "give one of|did you mean")
    refused(lambda: T.cast(1.0, "float16", sat="sat"), "did you mean 'satfinite'")


def test_tilelangs_hints_are_accepted():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128, is_cpu=False) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            most = T.alloc_fragment((64,), "float32")
            for _k in T.Pipelined(1, num_stages=1, order=None, stage=None, sync=None, group=None, annotations={}):
                T.copy(A, a, coalesced_width=8, disable_tma=True, eviction_policy="evict_normal", annotations={},
                       loop_layout=None, prefer_instruction="sync")  # fmt: skip
                T.gemm(a, a, c, transpose_B=True, clear_accum=True, k_pack=1, wg_wait=0, mbar=None, annotations={})
            T.reduce_max(buffer=c, out=most, dim=1, batch=1, nan_propagate=False)
            for i in T.unroll(1, explicit=True, unroll_factor=2, annotations={}):
                for j in T.serial(0, 1, None, annotations={}):
                    T.print(most, msg="most", warp_group_id=0, warp_id=0)
                    T.atomic_add(B[i, j], 1.0, use_tma=False)
            for i, j in T.Parallel(64, 64, coalesced_width=4, prefer_async=False, annotations={}):
                B[i, j] = c[i, j] + most[i]

    for target in ("cpu", "cuda:sm_80", "cuda:sm_90a"):
        torch_tile.compile(kernel, target=target)


def test_every_public_name_is_documented():
    """Classes and aliases, too; modules and values are not called."""
    known = [n for n in dir(T) if not n.startswith("_") and callable(getattr(T, n))]
    assert not [name for name in known if not inspect.getdoc(getattr(T, name))]
