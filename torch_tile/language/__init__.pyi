# SPDX-License-Identifier: Apache-2.0
"""The tile language: `import torch_tile.language as T`.

`python -m torch_tile.tools.stub` writes this file for editors and type checkers.
"""

import builtins
from typing import Any

from torch_tile.ir.dtype import (
    DType as DType,
    to_dtype as dtype,
)
from torch_tile.ir.expr import (
    Expr as PrimExpr,
)
from torch_tile.language.asynchronous import (
    barrier_arrive as barrier_arrive,
    barrier_wait as barrier_wait,
    cp_async_barrier_noinc as cp_async_barrier_noinc,
    dec_max_nreg as dec_max_nreg,
    fence_proxy_async as fence_proxy_async,
    gemm as gemm,
    get_lane_idx as get_lane_idx,
    get_warp_group_idx as get_warp_group_idx,
    get_warp_idx as get_warp_idx,
    get_warp_idx as get_warp_idx_sync,
    inc_max_nreg as inc_max_nreg,
    mbarrier_arrive as mbarrier_arrive,
    mbarrier_arrive_expect_tx as mbarrier_arrive_expect_tx,
    mbarrier_expect_tx as mbarrier_expect_tx,
    mbarrier_wait_parity as mbarrier_wait_parity,
    named_barrier_arrive as named_barrier_arrive,
    no_set_max_nreg as no_set_max_nreg,
    pdl_sync as pdl_sync,
    pdl_trigger as pdl_trigger,
    ptx_arrive_barrier as ptx_arrive_barrier,
    ptx_arrive_barrier_expect_tx as ptx_arrive_barrier_expect_tx,
    ptx_arrive_cluster_barrier as ptx_arrive_cluster_barrier,
    ptx_fence_barrier_init as ptx_fence_barrier_init,
    ptx_wait_barrier as ptx_wait_barrier,
    set_max_nreg as set_max_nreg,
    shuffle_elect as shuffle_elect,
    tma_store_arrive as tma_store_arrive,
    tma_store_wait as tma_store_wait,
    wait_wgmma as wait_wgmma,
    warpgroup_arrive as warpgroup_arrive,
    warpgroup_commit_batch as warpgroup_commit_batch,
    warpgroup_fence_operand as warpgroup_fence_operand,
    warpgroup_wait as warpgroup_wait,
    wgmma_gemm as wgmma_gemm,
)
from torch_tile.language.atomics import (
    arrive_last as arrive_last,
    atomic_load as atomic_load,
)
from torch_tile.language.bit_counts import (
    clz as clz,
    popcount as popcount,
)
from torch_tile.language.cluster import (
    at_rank as at_rank,
    block_rank_in_cluster as block_rank_in_cluster,
    cluster_arrive as cluster_arrive,
    cluster_arrive_relaxed as cluster_arrive_relaxed,
    cluster_sync as cluster_sync,
    cluster_wait as cluster_wait,
    copy_cluster as copy_cluster,
    get_cluster_dims as get_cluster_dims,
    get_cluster_extent as get_cluster_extent,
    get_cluster_extents as get_cluster_extents,
    get_cluster_id as get_cluster_id,
    get_cluster_ids as get_cluster_ids,
    get_cluster_size as get_cluster_size,
    tma_copy as tma_copy,
)
from torch_tile.language.effects import (
    address_of as address_of,
    annotate_compile_flags as annotate_compile_flags,
    annotate_pass_configs as annotate_pass_configs,
    assume as assume,
    call as call,
    device_assert as device_assert,
    evaluate as evaluate,
    print as print,
    tensor_map as tensor_map,
)
from torch_tile.language.emitters import (
    TensorCoreIntrinEmitter as TensorCoreIntrinEmitter,
    WGMMATensorCoreIntrinEmitter as WGMMATensorCoreIntrinEmitter,
    get_ldmatrix_offset as get_ldmatrix_offset,
    get_mma_micro_size as get_mma_micro_size,
    get_swizzle_layout as get_swizzle_layout,
    make_mma_swizzle_layout as make_mma_swizzle_layout,
    mma_store_index_map as mma_store_index_map,
)
from torch_tile.language.foreign import (
    CUDASourceCodeKernel as CUDASourceCodeKernel,
    access_ptr as access_ptr,
    call_extern as call_extern,
    call_pure_extern as call_pure_extern,
    import_source as import_source,
    ptx as ptx,
    tvm_access_ptr as tvm_access_ptr,
)
from torch_tile.language.gathers import (
    all_of as all_of,
    any_of as any_of,
    im2col as c2d_im2col,
    im2col as im2col,
    transpose as transpose,
)
from torch_tile.language.grid_sync import (
    sync_grid as sync_grid,
)
from torch_tile.language.instructions import (
    mma_fill as mma_fill,
    ptx_cp_async as ptx_cp_async,
    ptx_ldmatrix as ptx_ldmatrix,
    ptx_mma as ptx_mma,
)
from torch_tile.language.layout import (
    Fragment as Fragment,
    Layout as Layout,
    PartialFragment as PartialFragment,
    annotate_layout as annotate_layout,
    make_full_bank_swizzled_layout as make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout as make_half_bank_swizzled_layout,
    make_linear_layout as make_linear_layout,
    make_quarter_bank_swizzled_layout as make_quarter_bank_swizzled_layout,
    make_full_bank_swizzled_layout as make_swizzled_layout,
)
from torch_tile.language.loops import (
    Parallel as Parallel,
    Persistent as Persistent,
    PersistentTileScheduler as PersistentTileScheduler,
    Pipelined as Pipelined,
    serial as Serial,
    unroll as Unroll,
    vectorized as Vectorized,
    While as While,
    grid as grid,
    loop_break as loop_break,
    Parallel as parallel,
    Pipelined as pipelined,
    serial as serial,
    unroll as unroll,
    vectorized as vectorized,
)
from torch_tile.language.math import (
    And as And,
    Cast as Cast,
    Not as Not,
    Or as Or,
    if_then_else as Select,
    align_up as align_up,
    bitwise_and as bitwise_and,
    bitwise_not as bitwise_not,
    bitwise_or as bitwise_or,
    bitwise_xor as bitwise_xor,
    cast as cast,
    ceildiv as cdiv,
    ceildiv as ceildiv,
    clamp as clamp,
    exp10 as exp10,
    fast_rcp as fast_rcp,
    floordiv as floordiv,
    floormod as floormod,
    fmul as fmul,
    ieee_add as ieee_add,
    ieee_fdiv as ieee_fdiv,
    ieee_fmaf as ieee_fmaf,
    ieee_frcp as ieee_frcp,
    ieee_frsqrt as ieee_frsqrt,
    ieee_fsqrt as ieee_fsqrt,
    ieee_mul as ieee_mul,
    ieee_sub as ieee_sub,
    if_then_else as if_then_else,
    index_to_coordinates as index_to_coordinates,
    floordiv as indexdiv,
    floormod as indexmod,
    infinity as infinity,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    max as max,
    max_value as max_value,
    min as min,
    min_value as min_value,
    reinterpret as reinterpret,
    round as round,
    shift_left as shift_left,
    shift_right as shift_right,
    table_nibble as table_nibble,
    table_place as table_place,
    truncdiv as truncdiv,
    truncmod as truncmod,
)
from torch_tile.language.names import (
    Let as Let,
    Var as Var,
    bind as bind,
    let as let,
    likely as likely,
)
from torch_tile.language.pointers import (
    ptr as handle,
    make_tensor as make_tensor,
    make_tensor as make_tensor_from_addr,
    match_buffer as match_buffer,
    ptr as ptr,
)
from torch_tile.language.program import (
    PrimFunc as PrimFunc,
    Ref as Ref,
    macro as inline,
    macro as macro,
    meta_class as meta_class,
    prim_func as prim_func,
)
from torch_tile.language.random import (
    rng_init as rng_init,
    rng_rand as rng_rand,
    rng_rand_float as rng_rand_float,
)
from torch_tile.language.reducers import (
    alloc_reducer as alloc_reducer,
    attr as attr,
    comm_reducer as comm_reducer,
    finalize_reducer as finalize_reducer,
    reducer_init as reducer_init,
    reducer_update as reducer_update,
    syncthreads_and as syncthreads_and,
    syncthreads_count as syncthreads_count,
    syncthreads_or as syncthreads_or,
    tvm_thread_allreduce as tvm_thread_allreduce,
)
from torch_tile.language.roles import (
    ws as WarpSpecialize,
    role as role,
    ws as ws,
)
from torch_tile.language.safe_values import (
    annotate_safe_value as annotate_safe_value,
)
from torch_tile.language.scopes import (
    Kernel as ClusterKernel,
    Kernel as Kernel,
    alloc_barrier as alloc_barrier,
    alloc_buffer as alloc_buffer,
    alloc_cluster_barrier as alloc_cluster_barrier,
    alloc_fragment as alloc_fragment,
    alloc_global as alloc_global,
    alloc_local as alloc_local,
    alloc_shared as alloc_shared,
    alloc_var as alloc_var,
    annotate_consumer_reg_alloc as annotate_consumer_reg_alloc,
    annotate_l2_hit_ratio as annotate_l2_hit_ratio,
    annotate_min_blocks_per_sm as annotate_min_blocks_per_sm,
    annotate_producer_reg_dealloc as annotate_producer_reg_dealloc,
    annotate_restrict_buffers as annotate_restrict_buffers,
    const as const,
    create_list_of_mbarrier as create_list_of_mbarrier,
    alloc_buffer as decl_buffer,
    disable_warp_group_reg_alloc as disable_warp_group_reg_alloc,
    dynamic as dynamic,
    empty as empty,
    get_mbarrier as get_mbarrier,
    dynamic as symbolic,
    use_swizzle as use_swizzle,
)
from torch_tile.language.sparse import (
    gemm_sp as gemm_sp,
    gemm_sp as wgmma_gemm_sp,
)
from torch_tile.language.thread_return import (
    thread_return as thread_return,
)
from torch_tile.language.threads import (
    get_block_binding as get_block_binding,
    get_block_bindings as get_block_bindings,
    get_block_extent as get_block_extent,
    get_block_extents as get_block_extents,
    get_thread_binding as get_thread_binding,
    get_thread_bindings as get_thread_bindings,
    get_thread_extent as get_thread_extent,
    get_thread_extents as get_thread_extents,
    launch_thread as launch_thread,
    own_rows as own_rows,
    ptx_commit_group as ptx_commit_group,
    ptx_wait_group as ptx_wait_group,
    sync_threads as sync_threads,
    sync_warp as sync_warp,
    thread_binding as thread_binding,
    thread_index as thread_index,
    tvm_storage_sync as tvm_storage_sync,
)
from torch_tile.language.tma_by_hand import (
    create_tma_descriptor as create_tma_descriptor,
    tma_load as tma_load,
)
from torch_tile.language.values import (
    TensorType as TensorType,
)
from torch_tile.language.vectors import (
    Broadcast as Broadcast,
    Ramp as Ramp,
    Shuffle as Shuffle,
    Broadcast as broadcast,
    extract_lane as extract_lane,
    Ramp as ramp,
)
from torch_tile.language.views import (
    Tensor as Buffer,
    Tensor as FragmentBuffer,
    Tensor as LocalBuffer,
    Tensor as SharedBuffer,
    StridedTensor as StridedTensor,
    Tensor as Tensor,
    reshape as reshape,
    view as view,
)
from torch_tile.language.warps import (
    activemask as activemask,
    all_sync as all_sync,
    any_sync as any_sync,
    ballot_sync as ballot,
    ballot_sync as ballot_sync,
    dp4a as dp4a,
    match_all_sync as match_all_sync,
    match_any_sync as match_any_sync,
    shfl_down as shfl_down,
    shfl_sync as shfl_sync,
    shfl_up as shfl_up,
    shfl_xor as shfl_xor,
    activemask as tvm_warp_activemask,
    tvm_warp_shuffle as tvm_warp_shuffle,
    tvm_warp_shuffle_down as tvm_warp_shuffle_down,
    tvm_warp_shuffle_up as tvm_warp_shuffle_up,
)
from torch_tile.tileop.gemm.op import (
    GemmWarpPolicy as GemmWarpPolicy,
)

bfloat16: DType
bool: DType
boolean: DType
double: DType
e4m3_float8: DType
e5m2: DType
e5m2_float8: DType
float: DType
float16: DType
float32: DType
float4_e2m1fn: DType
float4_e2m1fn_x2: DType
float64: DType
float8_e4m3: DType
float8_e4m3fn: DType
float8_e4m3fnuz: DType
float8_e5m2: DType
float8_e5m2fnuz: DType
float8_e8m0fnu: DType
half: DType
int: DType
int16: DType
int2: DType
int32: DType
int4: DType
int64: DType
int8: DType
long: DType
short: DType
tfloat32: DType
uint: DType
uint16: DType
uint2: DType
uint32: DType
uint4: DType
uint64: DType
uint8: DType

def __cos(x: Any) -> Any:
    """T.cos(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __exp(x: Any) -> Any:
    """T.exp(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __exp10(x: Any) -> Any:
    """T.exp10(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __ffs(x: Any) -> Any:
    """Return the position of the lowest set bit, an int32 counted from 1, or 0 if no bit is set."""

def __fns(mask: Any, base: Any, offset: Any) -> Any:
    """Return the position of the `offset`-th set bit of a 32-bit `mask`, a uint32 counted from 0, as CUDA's __fns.

    The count starts at bit `base`, which is included. It goes down if `offset` is negative. With offset 0 only bit
    `base` is tested. The result is 0xFFFFFFFF if there is no such bit."""

def __ldg(load_or_buf: Any, index: Any = None) -> Any:
    """Load the element `A[i]`, or element `index` of a tensor of one dimension, through the read-only cache."""

def __log(x: Any) -> Any:
    """T.log(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __log10(x: Any) -> Any:
    """T.log10(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __log2(x: Any) -> Any:
    """T.log2(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __pow(x: Any, y: Any) -> Any:
    """`pow(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def __sin(x: Any) -> Any:
    """T.sin(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def __tan(x: Any) -> Any:
    """T.tan(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."""

def abs(x: Any) -> Any:
    """`abs(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def abs2(x: Any) -> Any:
    """The magnitude of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.abs2(...)`."""

def acos(x: Any) -> Any:
    """`acos(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def acosh(x: Any) -> Any:
    """`acosh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def add2(x: Any, y: Any) -> Any:
    """`x + y` of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.add2(...)`."""

def asin(x: Any) -> Any:
    """`asin(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def asinh(x: Any) -> Any:
    """`asinh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def async_copy(src: Any, dst: Any, *, coalesced_width: builtins.int | None = None, disable_tma: builtins.bool = False, eviction_policy: builtins.str | None = None, prefer_instruction: builtins.str | None = None, annotations: Any = None, loop_layout: Any = None, commit: builtins.bool = True) -> None:
    """Start to copy `src` to `dst`, from a tensor to shared memory. T.ptx_wait_group waits for it.

    Operands and hints are those of T.copy. Each copy is a group of its own; without `commit` it belongs to the
    group that T.ptx_commit_group ends. Raises TileError where the shapes differ, and for other kinds of memory."""

def async_loop(loop: Any) -> None:
    """Fill shared memory by `loop`, a T.Parallel nest, by cp.async; the compiler makes it of T.Parallel."""

def atan(x: Any) -> Any:
    """`atan(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def atan2(x: Any, y: Any) -> Any:
    """`atan2(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def atanh(x: Any) -> Any:
    """`atanh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def atomic_add(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False, use_tma: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: add.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool.
    `use_tma` is a hint. Raises TileError for types that a TMA does not add, with `return_prev`, and on targets
    without a TMA."""

def atomic_addx2(dst: Any, value: Any, return_prev: builtins.bool = False, memory_order: builtins.str | None = None) -> Any:
    """Add 2 neighbours along the last dimension, from an element on, each in one step.

    `dst` and `value` name the first of them: `T.atomic_addx2(A[i, j], tile[k, l])`, or all by a slice or a
    T.Ramp; a value may also be what T.add2 and others give. With `return_prev`, gives what stood there before, as
    T.atomic_add does: `v[0]`, `v[1]`, ..."""

def atomic_addx4(dst: Any, value: Any, return_prev: builtins.bool = False, memory_order: builtins.str | None = None) -> Any:
    """Add 4 neighbours along the last dimension, from an element on, each in one step.

    `dst` and `value` name the first of them: `T.atomic_addx4(A[i, j], tile[k, l])`, or all by a slice or a
    T.Ramp; a value may also be what T.add2 and others give. With `return_prev`, gives what stood there before, as
    T.atomic_add does: `v[0]`, `v[1]`, ..."""

def atomic_and(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: and.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def atomic_max(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: max.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def atomic_min(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: min.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def atomic_or(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: or.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def atomic_store(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: store.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def atomic_xor(dst: Any, value: Any, memory_order: builtins.str | None = None, return_prev: builtins.bool = False) -> Any:
    """Update `dst`, an element or each element of a region, in one step that nobody divides: xor.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool."""

def ceil(x: Any) -> Any:
    """`ceil(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def clear(buffer: Any) -> None:
    """Set every element of a buffer or region to zero."""

def copy(src: Any, dst: Any, *, coalesced_width: builtins.int | None = None, disable_tma: builtins.bool = False, eviction_policy: builtins.str | None = None, prefer_instruction: builtins.str | None = None, annotations: Any = None, loop_layout: Any = None) -> None:
    """Copy `src` to `dst`, converted to dst's dtype; a bool says whether the number is not 0.

    Operands are buffers or regions; an element takes the other operand's shape.

    Dimensions of size 1 are ignored. What lies outside a tensor reads as 0 and is not written.

    The rest says how a GPU moves the data and changes no result. `eviction_policy` says how its caches keep what is
    read from a tensor: "evict_normal", "evict_first" or "evict_last", or "no_allocate" for what is read once and
    needs no room in the L1 cache. `prefer_instruction` is "tma", "cp_async" or "sync"; `coalesced_width`,
    `disable_tma`, `annotations` and `loop_layout` are TileLang's. Raises TileError where the shapes differ."""

def copysign(x: Any, y: Any) -> Any:
    """`copysign(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def cos(x: Any) -> Any:
    """`cos(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def cosh(x: Any) -> Any:
    """`cosh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def cummax(src: Any, dst: Any = None, dim: builtins.int = 0, reverse: builtins.bool = False, annotations: Any = None) -> None:
    """Write running values of `src` along `dim`, the element itself included, into `dst` of its shape, or in place.

    With `reverse` they run from the last element to the first. `annotations` are hints of TileLang's without
    effect."""

def cumsum(src: Any, dst: Any = None, dim: builtins.int = 0, reverse: builtins.bool = False, annotations: Any = None) -> None:
    """Write running values of `src` along `dim`, the element itself included, into `dst` of its shape, or in place.

    With `reverse` they run from the last element to the first. `annotations` are hints of TileLang's without
    effect."""

def erf(x: Any) -> Any:
    """`erf(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def erfc(x: Any) -> Any:
    """`erfc(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def exp(x: Any) -> Any:
    """`exp(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def exp2(x: Any) -> Any:
    """`exp2(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def expm1(x: Any) -> Any:
    """`expm1(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fabs(x: Any) -> Any:
    """`abs(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fill(buffer: Any, value: Any) -> None:
    """Set every element of a buffer, region or element to `value`, converted to its dtype."""

def float8_of_code(x: Any) -> Any:
    """`float8_of_code(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def float_from_bits(x: Any, y: Any, z: Any) -> Any:
    """`float_from_bits(x, y, z)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def floor(x: Any) -> Any:
    """`floor(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fma(x: Any, y: Any, z: Any) -> Any:
    """`fma(x, y, z)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fma2(x: Any, y: Any, z: Any) -> Any:
    """`x * y + z`, rounded once, of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.fma2(...)`."""

def fmax(x: Any, y: Any) -> Any:
    """`fmax(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fmin(x: Any, y: Any) -> Any:
    """`fmin(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def fmod(x: Any, y: Any) -> Any:
    """`fmod(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def hypot(x: Any, y: Any) -> Any:
    """`hypot(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def isfinite(x: Any) -> Any:
    """`isfinite(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def isinf(x: Any) -> Any:
    """`isinf(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def isnan(x: Any) -> Any:
    """`isnan(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def isnan_(x: Any) -> Any:
    """`isnan(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def ldg128(src: Any, pred: Any = None) -> Any:
    """The 128 bits of global memory from `src` on: a vector of 4 uint32.

    `src` is an element, or a slice that begins with it.

    Where `pred` does not hold, nothing is read and it is 0. Raises TileError for other memory, and where elements do not make 128 bits."""

def ldg256(src: Any, pred: Any = None) -> Any:
    """The 256 bits of global memory from `src` on: a vector of 8 uint32.

    `src` is an element, or a slice that begins with it.

    Where `pred` does not hold, nothing is read and it is 0. Raises TileError for other memory, and where elements do not make 256 bits."""

def ldg32(src: Any, pred: Any = None) -> Any:
    """The 32 bits of global memory from `src` on: a uint32.

    `src` is an element, or a slice that begins with it.

    Where `pred` does not hold, nothing is read and it is 0. Raises TileError for other memory, and where elements do not make 32 bits."""

def ldg64(src: Any, pred: Any = None) -> Any:
    """The 64 bits of global memory from `src` on: a vector of 2 uint32.

    `src` is an element, or a slice that begins with it.

    Where `pred` does not hold, nothing is read and it is 0. Raises TileError for other memory, and where elements do not make 64 bits."""

def lds128(src: Any) -> Any:
    """The 128 bits of shared memory from `src` on: a vector of 4 uint32.

    `src` is an element, or a slice that begins with it.

    Raises TileError for other memory, and where elements do not make 128 bits."""

def lds32(src: Any) -> Any:
    """The 32 bits of shared memory from `src` on: a uint32.

    `src` is an element, or a slice that begins with it.

    Raises TileError for other memory, and where elements do not make 32 bits."""

def lds64(src: Any) -> Any:
    """The 64 bits of shared memory from `src` on: a vector of 2 uint32.

    `src` is an element, or a slice that begins with it.

    Raises TileError for other memory, and where elements do not make 64 bits."""

def log(x: Any) -> Any:
    """`log(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def log10(x: Any) -> Any:
    """`log10(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def log1p(x: Any) -> Any:
    """`log1p(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def log2(x: Any) -> Any:
    """`log2(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def max2(x: Any, y: Any) -> Any:
    """The larger of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.max2(...)`."""

def maximum(x: Any, y: Any) -> Any:
    """`maximum(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def min2(x: Any, y: Any) -> Any:
    """The smaller of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.min2(...)`."""

def minimum(x: Any, y: Any) -> Any:
    """`minimum(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def mul2(x: Any, y: Any) -> Any:
    """`x * y` of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.mul2(...)`."""

def nearbyint(x: Any) -> Any:
    """`round(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def nibble(x: Any, y: Any, z: Any) -> Any:
    """`nibble(x, y, z)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def nibble_in_place(x: Any, y: Any, z: Any) -> Any:
    """`nibble_in_place(x, y, z)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def positive_half(x: Any) -> Any:
    """`positive_half(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def pow(x: Any, y: Any) -> Any:
    """`pow(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def power(x: Any, y: Any) -> Any:
    """`pow(x, y)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def quick_erf(x: Any) -> Any:
    """`quick_erf(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def quick_sigmoid(x: Any) -> Any:
    """`quick_sigmoid(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def quick_tanh(x: Any) -> Any:
    """`quick_tanh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def reduce(buffer: Any, out: Any, reduce_type: builtins.str, dim: builtins.int = -1, clear: Any = True, *, batch: builtins.int = 1, nan_propagate: Any = False) -> None:
    """Call T.reduce_sum, or the reduction that `reduce_type` names, with the same operands.

    It is "sum", "max", "min", "absmax", "abssum", "bitand", "bitor" or "bitxor".

    `nan_propagate` is for max, min and absmax."""

def reduce_absmax(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, nan_propagate: builtins.bool = False, annotations: Any = None) -> None:
    """Reduce dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, the old value of `out` takes part. NaN counts as no element. If all elements are NaN, the
    result is the neutral element, -inf for a maximum. With `nan_propagate` a NaN makes the result NaN. `batch` and
    `annotations` are hints of TileLang's without effect. Raises TileError for another dimension or shape."""

def reduce_abssum(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, annotations: Any = None) -> None:
    """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
    effect. Raises TileError for another dimension or shape."""

def reduce_bitand(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, annotations: Any = None) -> None:
    """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
    effect. Raises TileError for another dimension or shape."""

def reduce_bitor(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, annotations: Any = None) -> None:
    """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
    effect. Raises TileError for another dimension or shape."""

def reduce_bitxor(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, annotations: Any = None) -> None:
    """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
    effect. Raises TileError for another dimension or shape."""

def reduce_max(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, nan_propagate: builtins.bool = False, annotations: Any = None) -> None:
    """Reduce dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, the old value of `out` takes part. NaN counts as no element. If all elements are NaN, the
    result is the neutral element, -inf for a maximum. With `nan_propagate` a NaN makes the result NaN. `batch` and
    `annotations` are hints of TileLang's without effect. Raises TileError for another dimension or shape."""

def reduce_min(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, nan_propagate: builtins.bool = False, annotations: Any = None) -> None:
    """Reduce dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, the old value of `out` takes part. NaN counts as no element. If all elements are NaN, the
    result is the neutral element, -inf for a maximum. With `nan_propagate` a NaN makes the result NaN. `batch` and
    `annotations` are hints of TileLang's without effect. Raises TileError for another dimension or shape."""

def reduce_sum(buffer: Any, out: Any, dim: builtins.int = -1, clear: builtins.bool = True, *, batch: builtins.int = 1, annotations: Any = None) -> None:
    """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

    Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
    effect. Raises TileError for another dimension or shape."""

def rsqrt(x: Any) -> Any:
    """`rsqrt(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def scale_rows(tile: Any, factors: Any) -> None:
    """Multiply `tile[i, ...] *= factors[i]`: one factor for each index of the tile's first dimension."""

def sigmoid(x: Any) -> Any:
    """`sigmoid(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def sin(x: Any) -> Any:
    """`sin(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def sinh(x: Any) -> Any:
    """`sinh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def sqrt(x: Any) -> Any:
    """`sqrt(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def stg128(dst: Any, value: Any, pred: Any = None) -> None:
    """Write 128 bits to global memory from `dst`, an element or the first of a slice, on.

    `value` is what T.ldg128 gives, or values of as many bits. Where `pred` does not hold, nothing is written. Raises TileError as that does."""

def stg256(dst: Any, value: Any, pred: Any = None) -> None:
    """Write 256 bits to global memory from `dst`, an element or the first of a slice, on.

    `value` is what T.ldg256 gives, or values of as many bits. Where `pred` does not hold, nothing is written. Raises TileError as that does."""

def stg32(dst: Any, value: Any, pred: Any = None) -> None:
    """Write 32 bits to global memory from `dst`, an element or the first of a slice, on.

    `value` is what T.ldg32 gives, or values of as many bits. Where `pred` does not hold, nothing is written. Raises TileError as that does."""

def stg64(dst: Any, value: Any, pred: Any = None) -> None:
    """Write 64 bits to global memory from `dst`, an element or the first of a slice, on.

    `value` is what T.ldg64 gives, or values of as many bits. Where `pred` does not hold, nothing is written. Raises TileError as that does."""

def sts128(dst: Any, value: Any) -> None:
    """Write 128 bits to shared memory from `dst`, an element or the first of a slice, on.

    `value` is what T.lds128 gives, or values of as many bits. Raises TileError as that does."""

def sts32(dst: Any, value: Any) -> None:
    """Write 32 bits to shared memory from `dst`, an element or the first of a slice, on.

    `value` is what T.lds32 gives, or values of as many bits. Raises TileError as that does."""

def sts64(dst: Any, value: Any) -> None:
    """Write 64 bits to shared memory from `dst`, an element or the first of a slice, on.

    `value` is what T.lds64 gives, or values of as many bits. Raises TileError as that does."""

def sub2(x: Any, y: Any) -> Any:
    """`x - y` of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.sub2(...)`."""

def tan(x: Any) -> Any:
    """`tan(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def tanh(x: Any) -> Any:
    """`tanh(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def trunc(x: Any) -> Any:
    """`trunc(x)` of numbers or expressions: of an element in each iteration of T.Parallel."""

def warp_reduce_bitand(value: Any) -> Any:
    """The bitand of a value over the 32 lanes of a warp, the same bits in each of them."""

def warp_reduce_bitor(value: Any) -> Any:
    """The bitor of a value over the 32 lanes of a warp, the same bits in each of them."""

def warp_reduce_max(value: Any) -> Any:
    """The max of a value over the 32 lanes of a warp, the same bits in each of them."""

def warp_reduce_min(value: Any) -> Any:
    """The min of a value over the 32 lanes of a warp, the same bits in each of them."""

def warp_reduce_sum(value: Any) -> Any:
    """The sum of a value over the 32 lanes of a warp, the same bits in each of them."""

def wgmma_results(C: Any) -> None:
    """Say that results of products in flight, in `C`, are used from here on; T.wait_wgmma says so too."""

__all__ = [
    "And",
    "Broadcast",
    "Buffer",
    "CUDASourceCodeKernel",
    "Cast",
    "ClusterKernel",
    "DType",
    "Fragment",
    "FragmentBuffer",
    "GemmWarpPolicy",
    "Kernel",
    "Layout",
    "Let",
    "LocalBuffer",
    "Not",
    "Or",
    "Parallel",
    "PartialFragment",
    "Persistent",
    "PersistentTileScheduler",
    "Pipelined",
    "PrimExpr",
    "PrimFunc",
    "Ramp",
    "Ref",
    "Select",
    "Serial",
    "SharedBuffer",
    "Shuffle",
    "StridedTensor",
    "Tensor",
    "TensorCoreIntrinEmitter",
    "TensorType",
    "Unroll",
    "Var",
    "Vectorized",
    "WGMMATensorCoreIntrinEmitter",
    "WarpSpecialize",
    "While",
    "abs2",
    "access_ptr",
    "acos",
    "acosh",
    "activemask",
    "add2",
    "address_of",
    "align_up",
    "all_of",
    "all_sync",
    "alloc_barrier",
    "alloc_buffer",
    "alloc_cluster_barrier",
    "alloc_fragment",
    "alloc_global",
    "alloc_local",
    "alloc_reducer",
    "alloc_shared",
    "alloc_var",
    "annotate_compile_flags",
    "annotate_consumer_reg_alloc",
    "annotate_l2_hit_ratio",
    "annotate_layout",
    "annotate_min_blocks_per_sm",
    "annotate_pass_configs",
    "annotate_producer_reg_dealloc",
    "annotate_restrict_buffers",
    "annotate_safe_value",
    "any_of",
    "any_sync",
    "arrive_last",
    "asin",
    "asinh",
    "assume",
    "async_copy",
    "async_loop",
    "at_rank",
    "atan",
    "atan2",
    "atanh",
    "atomic_add",
    "atomic_addx2",
    "atomic_addx4",
    "atomic_and",
    "atomic_load",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_store",
    "atomic_xor",
    "attr",
    "ballot",
    "ballot_sync",
    "barrier_arrive",
    "barrier_wait",
    "bfloat16",
    "bind",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "block_rank_in_cluster",
    "boolean",
    "broadcast",
    "c2d_im2col",
    "call",
    "call_extern",
    "call_pure_extern",
    "cast",
    "cdiv",
    "ceil",
    "ceildiv",
    "clamp",
    "clear",
    "cluster_arrive",
    "cluster_arrive_relaxed",
    "cluster_sync",
    "cluster_wait",
    "clz",
    "comm_reducer",
    "const",
    "copy",
    "copy_cluster",
    "copysign",
    "cos",
    "cosh",
    "cp_async_barrier_noinc",
    "create_list_of_mbarrier",
    "create_tma_descriptor",
    "cummax",
    "cumsum",
    "dec_max_nreg",
    "decl_buffer",
    "device_assert",
    "disable_warp_group_reg_alloc",
    "double",
    "dp4a",
    "dtype",
    "dynamic",
    "e4m3_float8",
    "e5m2",
    "e5m2_float8",
    "empty",
    "erf",
    "erfc",
    "evaluate",
    "exp",
    "exp10",
    "exp2",
    "expm1",
    "extract_lane",
    "fabs",
    "fast_rcp",
    "fence_proxy_async",
    "fill",
    "finalize_reducer",
    "float16",
    "float32",
    "float4_e2m1fn",
    "float4_e2m1fn_x2",
    "float64",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_of_code",
    "float_from_bits",
    "floor",
    "floordiv",
    "floormod",
    "fma",
    "fma2",
    "fmax",
    "fmin",
    "fmod",
    "fmul",
    "gemm",
    "gemm_sp",
    "get_block_binding",
    "get_block_bindings",
    "get_block_extent",
    "get_block_extents",
    "get_cluster_dims",
    "get_cluster_extent",
    "get_cluster_extents",
    "get_cluster_id",
    "get_cluster_ids",
    "get_cluster_size",
    "get_lane_idx",
    "get_ldmatrix_offset",
    "get_mbarrier",
    "get_mma_micro_size",
    "get_swizzle_layout",
    "get_thread_binding",
    "get_thread_bindings",
    "get_thread_extent",
    "get_thread_extents",
    "get_warp_group_idx",
    "get_warp_idx",
    "get_warp_idx_sync",
    "grid",
    "half",
    "handle",
    "hypot",
    "ieee_add",
    "ieee_fdiv",
    "ieee_fmaf",
    "ieee_frcp",
    "ieee_frsqrt",
    "ieee_fsqrt",
    "ieee_mul",
    "ieee_sub",
    "if_then_else",
    "im2col",
    "import_source",
    "inc_max_nreg",
    "index_to_coordinates",
    "indexdiv",
    "indexmod",
    "infinity",
    "inline",
    "int16",
    "int2",
    "int32",
    "int4",
    "int64",
    "int8",
    "isfinite",
    "isinf",
    "isnan",
    "isnan_",
    "launch_thread",
    "ldg128",
    "ldg256",
    "ldg32",
    "ldg64",
    "lds128",
    "lds32",
    "lds64",
    "let",
    "likely",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "long",
    "loop_break",
    "macro",
    "make_full_bank_swizzled_layout",
    "make_half_bank_swizzled_layout",
    "make_linear_layout",
    "make_mma_swizzle_layout",
    "make_quarter_bank_swizzled_layout",
    "make_swizzled_layout",
    "make_tensor",
    "make_tensor_from_addr",
    "match_all_sync",
    "match_any_sync",
    "match_buffer",
    "max",
    "max2",
    "max_value",
    "maximum",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_expect_tx",
    "mbarrier_wait_parity",
    "meta_class",
    "min",
    "min2",
    "min_value",
    "minimum",
    "mma_fill",
    "mma_store_index_map",
    "mul2",
    "named_barrier_arrive",
    "nearbyint",
    "nibble",
    "nibble_in_place",
    "no_set_max_nreg",
    "own_rows",
    "parallel",
    "pdl_sync",
    "pdl_trigger",
    "pipelined",
    "popcount",
    "positive_half",
    "power",
    "prim_func",
    "print",
    "ptr",
    "ptx",
    "ptx_arrive_barrier",
    "ptx_arrive_barrier_expect_tx",
    "ptx_arrive_cluster_barrier",
    "ptx_commit_group",
    "ptx_cp_async",
    "ptx_fence_barrier_init",
    "ptx_ldmatrix",
    "ptx_mma",
    "ptx_wait_barrier",
    "ptx_wait_group",
    "quick_erf",
    "quick_sigmoid",
    "quick_tanh",
    "ramp",
    "reduce",
    "reduce_absmax",
    "reduce_abssum",
    "reduce_bitand",
    "reduce_bitor",
    "reduce_bitxor",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "reducer_init",
    "reducer_update",
    "reinterpret",
    "reshape",
    "rng_init",
    "rng_rand",
    "rng_rand_float",
    "role",
    "rsqrt",
    "scale_rows",
    "serial",
    "set_max_nreg",
    "shfl_down",
    "shfl_sync",
    "shfl_up",
    "shfl_xor",
    "shift_left",
    "shift_right",
    "short",
    "shuffle_elect",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "stg128",
    "stg256",
    "stg32",
    "stg64",
    "sts128",
    "sts32",
    "sts64",
    "sub2",
    "symbolic",
    "sync_grid",
    "sync_threads",
    "sync_warp",
    "syncthreads_and",
    "syncthreads_count",
    "syncthreads_or",
    "table_nibble",
    "table_place",
    "tan",
    "tanh",
    "tensor_map",
    "tfloat32",
    "thread_binding",
    "thread_index",
    "thread_return",
    "tma_copy",
    "tma_load",
    "tma_store_arrive",
    "tma_store_wait",
    "transpose",
    "trunc",
    "truncdiv",
    "truncmod",
    "tvm_access_ptr",
    "tvm_storage_sync",
    "tvm_thread_allreduce",
    "tvm_warp_activemask",
    "tvm_warp_shuffle",
    "tvm_warp_shuffle_down",
    "tvm_warp_shuffle_up",
    "uint",
    "uint16",
    "uint2",
    "uint32",
    "uint4",
    "uint64",
    "uint8",
    "unroll",
    "use_swizzle",
    "vectorized",
    "view",
    "wait_wgmma",
    "warp_reduce_bitand",
    "warp_reduce_bitor",
    "warp_reduce_max",
    "warp_reduce_min",
    "warp_reduce_sum",
    "warpgroup_arrive",
    "warpgroup_commit_batch",
    "warpgroup_fence_operand",
    "warpgroup_wait",
    "wgmma_gemm",
    "wgmma_gemm_sp",
    "wgmma_results",
    "ws",
]
