# SPDX-License-Identifier: Apache-2.0
"""The tile language: `import torch_tile.language as T`. Grouped as an author meets it."""

from __future__ import annotations

import builtins as _builtins
import sys as _sys
from types import ModuleType as _ModuleType
from typing import Any

from torch_tile import tileop as _tileop
from torch_tile.ir.dtype import ALIASES as _ALIASES, ALL as _DTYPES, NARROW as _NARROW, DType, to_dtype as dtype
from torch_tile.ir.expr import Expr as PrimExpr
from torch_tile.language import atomics as _atomics, bit_counts as _bit_counts, lanes as _lanes, math as _math
from torch_tile.language.asynchronous import (
    barrier_arrive,
    barrier_wait,
    cp_async_barrier_noinc,
    dec_max_nreg,
    fence_proxy_async,
    gemm,
    get_lane_idx,
    get_warp_group_idx,
    get_warp_idx,
    inc_max_nreg,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_expect_tx,
    mbarrier_wait_parity,
    named_barrier_arrive,
    no_set_max_nreg,
    pdl_sync,
    pdl_trigger,
    ptx_arrive_barrier,
    ptx_arrive_barrier_expect_tx,
    ptx_arrive_cluster_barrier,
    ptx_fence_barrier_init,
    ptx_wait_barrier,
    set_max_nreg,
    shuffle_elect,
    tma_store_arrive,
    tma_store_wait,
    wait_wgmma,
    warpgroup_arrive,
    warpgroup_commit_batch,
    warpgroup_fence_operand,
    warpgroup_wait,
    wgmma_gemm,
)  # fmt: skip
from torch_tile.language.atomics import arrive_last, atomic_load
from torch_tile.language.bit_counts import clz, popcount
from torch_tile.language.calls import check_all as _check_all, recorded as _recorded
from torch_tile.language.cluster import (
    at_rank,
    block_rank_in_cluster,
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_sync,
    cluster_wait,
    copy_cluster,
    get_cluster_dims,
    get_cluster_extent,
    get_cluster_extents,
    get_cluster_id,
    get_cluster_ids,
    get_cluster_size,
    tma_copy,
)  # fmt: skip
from torch_tile.language.effects import (
    address_of,
    annotate_compile_flags,
    annotate_pass_configs,
    assume,
    call,
    device_assert,
    evaluate,
    print,
    tensor_map,
)
from torch_tile.language.emitters import (
    TensorCoreIntrinEmitter,
    WGMMATensorCoreIntrinEmitter,
    get_ldmatrix_offset,
    get_mma_micro_size,
    get_swizzle_layout,
    make_mma_swizzle_layout,
    mma_store_index_map,
)  # fmt: skip
from torch_tile.language.foreign import (
    CUDASourceCodeKernel,
    access_ptr,
    call_extern,
    call_pure_extern,
    import_source,
    ptx,
    tvm_access_ptr,
)  # fmt: skip
from torch_tile.language.gathers import all_of, any_of, im2col, transpose
from torch_tile.language.grid_sync import sync_grid
from torch_tile.language.instructions import mma_fill, ptx_cp_async, ptx_ldmatrix, ptx_mma
from torch_tile.language.layout import (
    Fragment,
    Layout,
    PartialFragment,
    annotate_layout,
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_linear_layout,
    make_quarter_bank_swizzled_layout,
    make_swizzled_layout,
)  # fmt: skip
from torch_tile.language.loops import (
    Parallel,
    Persistent,
    PersistentTileScheduler,
    Pipelined,
    While,
    grid,
    loop_break,
    serial,
    unroll,
    vectorized,
)
from torch_tile.language.math import (
    And,
    Cast,
    Not,
    Or,
    Select,
    align_up,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    cast,
    ceildiv,
    clamp,
    exp10,
    fast_rcp,
    floordiv,
    floormod,
    fmul,
    ieee_add,
    ieee_fdiv,
    ieee_fmaf,
    ieee_frcp,
    ieee_frsqrt,
    ieee_fsqrt,
    ieee_mul,
    ieee_sub,
    if_then_else,
    index_to_coordinates,
    infinity,
    logical_and,
    logical_not,
    logical_or,
    max,
    max_value,
    min,
    min_value,
    reinterpret,
    round,
    shift_left,
    shift_right,
    table_nibble,
    table_place,
    truncdiv,
    truncmod,
)  # fmt: skip
from torch_tile.language.misuse import explain as _explain, instead as _instead, unknown_name as _unknown_name
from torch_tile.language.names import Let, Var, bind, let, likely
from torch_tile.language.pointers import handle, make_tensor, make_tensor_from_addr, match_buffer, ptr
from torch_tile.language.program import PrimFunc, Ref, macro, meta_class, prim_func
from torch_tile.language.random import rng_init, rng_rand, rng_rand_float
from torch_tile.language.reducers import (
    alloc_reducer,
    attr,
    comm_reducer,
    finalize_reducer,
    reducer_init,
    reducer_update,
    syncthreads_and,
    syncthreads_count,
    syncthreads_or,
    tvm_thread_allreduce,
)  # fmt: skip
from torch_tile.language.roles import role, ws
from torch_tile.language.safe_values import annotate_safe_value
from torch_tile.language.scopes import (
    Kernel,
    alloc_barrier,
    alloc_buffer,
    alloc_cluster_barrier,
    alloc_fragment,
    alloc_global,
    alloc_local,
    alloc_shared,
    alloc_var,
    annotate_consumer_reg_alloc,
    annotate_l2_hit_ratio,
    annotate_min_blocks_per_sm,
    annotate_producer_reg_dealloc,
    annotate_restrict_buffers,
    const,
    create_list_of_mbarrier,
    decl_buffer,
    disable_warp_group_reg_alloc,
    dynamic,
    empty,
    get_mbarrier,
    symbolic,
    use_swizzle,
)  # fmt: skip  # fmt: skip
from torch_tile.language.sparse import gemm_sp, wgmma_gemm_sp
from torch_tile.language.thread_return import thread_return
from torch_tile.language.threads import (
    get_block_binding,
    get_block_bindings,
    get_block_extent,
    get_block_extents,
    get_thread_binding,
    get_thread_bindings,
    get_thread_extent,
    get_thread_extents,
    launch_thread,
    own_rows,
    ptx_commit_group,
    ptx_wait_group,
    sync_threads,
    sync_warp,
    thread_binding,
    thread_index,
    tvm_storage_sync,
)  # fmt: skip
from torch_tile.language.tma_by_hand import create_tma_descriptor, tma_load
from torch_tile.language.trace import explainers as _explainers
from torch_tile.language.values import TensorType
from torch_tile.language.vectors import Broadcast, Ramp, Shuffle, extract_lane
from torch_tile.language.views import StridedTensor, Tensor, reshape, view
from torch_tile.language.warps import (
    activemask,
    all_sync,
    any_sync,
    ballot_sync,
    dp4a,
    match_all_sync,
    match_any_sync,
    shfl_down,
    shfl_sync,
    shfl_up,
    shfl_xor,
    tvm_warp_shuffle,
    tvm_warp_shuffle_down,
    tvm_warp_shuffle_up,
    warp_reduce as _warp_reduce,
)  # fmt: skip
from torch_tile.tileop.atomic import ATOMICS as _ATOMICS
from torch_tile.tileop.base import need_choice as _need_choice, need_region as _need_region
from torch_tile.tileop.gemm.op import GemmWarpPolicy
from torch_tile.tileop.reduce.op import REDUCTIONS as _REDUCTIONS

Buffer = Tensor  # TileLang's older spelling of the annotation
SharedBuffer = FragmentBuffer = LocalBuffer = Tensor  # annotations of macros' arguments; a macro takes any buffer
ClusterKernel = Kernel  # with cluster_dims
Serial, Unroll, Vectorized = serial, unroll, vectorized
pipelined, parallel = Pipelined, Parallel
c2d_im2col, ballot = im2col, ballot_sync
ramp, broadcast = Ramp, Broadcast
get_warp_idx_sync = get_warp_idx
tvm_warp_activemask, WarpSpecialize = activemask, ws
inline = macro
indexdiv, indexmod = floordiv, floormod
cdiv = ceildiv

# Dtypes: T.float16, T.bfloat16, ..., T.float, T.half; each is also a cast, T.float16(x).
globals().update({t.name: t for t in (*_DTYPES, *_NARROW)} | {n: t for n, t in _ALIASES.items() if n != "e4m3"})
bool: DType = dtype("bool")

# Math: T.exp2, T.sqrt, ...; fast-math spellings mean the same function, of floats.
globals().update({n: _math.function(n) for n in _math.FUNCTIONS if n != "round"})
globals().update({f"__{n}": _math.fast(n, _math.function(n)) for n in _math.FAST})
globals().update({"__pow": _math.function("pow"), "__exp10": _math.fast("exp10", exp10)})
fabs, nearbyint, isnan_ = _math.function("abs"), _math.function("round"), _math.function("isnan")
power = _math.function("pow")
globals().update({"__ffs": _bit_counts.ffs, "__fns": _bit_counts.fns})

# Exchanges between the lanes of a warp: T.warp_reduce_sum, ...
globals().update({f"warp_reduce_{n}": _warp_reduce(n) for n in ("sum", "max", "min", "bitand", "bitor")})

# Neighbours at once: T.ldg128, T.sts64, T.add2, ...
globals().update({f"ld{kind}{n}": _lanes.load(kind, n) for kind, widths in _lanes.WIDTHS.items() for n in widths})
globals().update({f"st{kind}{n}": _lanes.store(kind, n) for kind, widths in _lanes.WIDTHS.items() for n in widths})
globals().update({n: _lanes.pairs(n, *rest) for n, rest in _lanes.PAIRS.items()} | {"__ldg": _lanes.ldg})

# Atomic updates: T.atomic_add, T.atomic_addx4, ...
globals().update({f"atomic_{n}": _atomics.update(n) for n in _ATOMICS})
globals().update({f"atomic_addx{n}": _atomics.add_neighbours(n) for n in (2, 4)})

# Tile ops: T.copy, T.gemm, T.reduce_max, ...; those that give a value have a function of their own above.
globals().update({n: _recorded(n, op.build) for n, op in _tileop.tile_ops().items() if n not in globals()})


def clear(buffer: Any) -> None:
    """Set every element of a buffer or region to zero."""
    _need_region(buffer, "clear", "buffer")
    globals()["fill"](buffer, 0)


def reduce(
    buffer: Any,
    out: Any,
    reduce_type: str,
    dim: int = -1,
    clear: Any = True,
    *,
    batch: int = 1,
    nan_propagate: Any = False,
) -> None:
    """Call T.reduce_sum, or the reduction that `reduce_type` names, with the same operands.

    It is "sum", "max", "min", "absmax", "abssum", "bitand", "bitor" or "bitxor".

    `nan_propagate` is for max, min and absmax.
    """
    _need_choice("reduce", "reduce_type", reduce_type, tuple(_REDUCTIONS))
    options = {"nan_propagate": nan_propagate} if nan_propagate else {}
    globals()[f"reduce_{reduce_type}"](buffer, out, dim=dim, clear=clear, batch=batch, **options)


_check_all(globals())  # a call that does not fit is an error on its line


def __getattr__(name: str) -> Any:
    """Raise an error that explains a misspelt name, or a name that only TileLang has."""
    if name.startswith("__") and name.endswith("__") and not _instead(name):  # Python asks modules for such names
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "x" in name and name[0].islower():
        try:
            return dtype(name)  # names of vectors, such as T.float32x4
        except ValueError:
            pass
    raise _unknown_name(name, globals())


_explainers.append(lambda problem, span: _explain(problem, span, _sys.modules[__name__]))

# All names that a user may take. `import *` leaves out T.int, T.abs and their like, which would hide Python's own.
__all__ = sorted(
    name for name, value in globals().items()
    if not (name.startswith("_") or isinstance(value, _ModuleType) or name in ("Any", "annotations"))
    and (name in ("max", "min", "print") or not hasattr(_builtins, name))
)  # fmt: skip
