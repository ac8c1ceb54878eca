# SPDX-License-Identifier: Apache-2.0
"""Kernels and memory of the language: T.Kernel, T.alloc_*, T.empty, dimensions, annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import CHIPS
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import SPELLINGS, Buffer
from torch_tile.ir.expr import Expr, Load, Var, cast, constant_to_store, is_number
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, Kernel as KernelNode
from torch_tile.language.asynchronous import in_kernel, listed_mbarrier, pin_results
from torch_tile.language.cluster import clusters
from torch_tile.language.grid_sync import Launch, cut_at_grid_syncs
from torch_tile.language.layout import request
from torch_tile.language.roles import check_registers, gather_roles, outermost
from torch_tile.language.rounding import greatest
from torch_tile.language.safe_values import with_safe_values
from torch_tile.language.thread_return import without_returns
from torch_tile.language.trace import author_span, close_body, expand_names, make_variable, tracer, with_span
from torch_tile.language.values import Handle, Indices, TensorType, dtype_of, shape_of, sized
from torch_tile.language.vectors import VectorVariable
from torch_tile.language.views import view
from torch_tile.tileop.base import Scalar, need_choice, region_of
from torch_tile.tolerance import tolerant

MOST_THREADS = max(chip.thread_limit for chip in CHIPS.values())  # at once on a multiprocessor; fewer on some GPUs


class Kernel:
    """`with T.Kernel(*blocks, threads=128) as (bx, by)`: the body runs once per block of the grid.

    `blocks` are up to three sizes, x first; sizes may be symbolic. Without any, one block runs.
    `threads` is an integer or up to three integers. `as (bx,)` takes a tuple also of a grid of one size.
    Blocks of a cluster, `cluster_dims` of them along each dimension, run at the same time (sm_90 and later).
    `is_cpu` is a hint of TileLang's without effect; `shared_bytes` is for printed kernels: the compiler finds it.
    `prelude` is text of CUDA for T.call_extern, as T.import_source takes it.
    """

    def __init__(
        self,
        *blocks: Any,
        threads: int | Sequence[int] | None = None,
        cluster_dims: int | Sequence[int] | None = None,
        is_cpu: bool = False,
        prelude: str | None = None,
        shared_bytes: int = 0,
    ):
        at = tracer("T.Kernel")
        if prelude is not None:
            at.sources.setdefault("cuda", []).append(str(prelude))
        if at.scopes:
            raise error("nested_kernel", None)
        if len(blocks) > 3:
            fix = "give the threads of a block by name: T.Kernel(x, y, z, threads=128)"
            want = "at most three sizes"
            raise error("bad_shape", None, what="T.Kernel's grid", want=want, got=repr(blocks)[:60], fix=fix)
        self.grid: tuple[Expr, ...] = grid_of(blocks or (1,))
        given = (128,) if threads is None else threads if isinstance(threads, tuple | list) else (threads,)
        if not 1 <= len(given) <= 3 or not all(type(t) is not bool and isinstance(t, int) and t > 0 for t in given):
            raise error("bad_shape", None, what="threads", want="one to three positive integers", got=repr(threads))
        self.threads: tuple[int, ...] = tuple(int(t) for t in given)
        self.names: tuple[str | None, ...] = ("bx", "by", "bz")
        self.shared_bytes: int = int(shared_bytes)  # of printed kernels
        self.cluster: tuple[int, int, int] = clusters(cluster_dims, len(self.grid))
        self.as_tuple: bool = len(self.grid) > 1  # what `as` names
        self.min_blocks = 1
        self.span = author_span()
        at.waiting = self

    def take_names(self, target: str | tuple[str | None, ...] | None) -> None:
        """Return the block indices under the author's names: one, or several in parentheses."""
        names = target if isinstance(target, tuple) else (target,)
        self.as_tuple = self.as_tuple or isinstance(target, tuple)
        if isinstance(target, tuple) and None not in names and len(names) != len(self.grid):
            why, fix = f"is a grid of {len(self.grid)} for {len(names)} names", "give one name for each size"
            raise error("bad_argument", self.span, op="T.Kernel", name="blocks", why=why, fix=fix)
        if len(names) == len(self.grid):
            self.names = names

    def bind(self, of_block: bool, dim: int, size: Any) -> None:
        """Hear of T.thread_binding: the sizes of this kernel are known."""

    def __enter__(self) -> Any:
        at = tracer()
        at.swizzle = None
        at.safe_values = IdMap()
        at.launch, at.waiting = self, None
        self.scope = at.open("kernel")
        self.opened = self.scope.__enter__()
        self.blocks: tuple[Var, ...] = tuple(
            Var(n or "b", dt.int32, "block") for n, _ in zip(self.names, self.grid, strict=False)
        )
        self.thread: Var = Var("thread", dt.int32, "thread")
        self.uses_thread = False
        for var in (*self.blocks, self.thread):
            at.own(var)
        return Indices(self.blocks, self.span) if self.as_tuple else self.blocks[0]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope.__exit__(kind, value, trace)
        if kind is None:
            at = tracer()
            if at.swizzle is not None and self.cluster != (1, 1, 1):
                why, fix = "is given to blocks in clusters", "leave out one of the two"
                raise error("bad_argument", self.span, op="T.Kernel", name="cluster_dims", why=why, fix=fix)
            whole = without_returns(close_body(self.opened))
            launch = Launch(
                self.grid, self.blocks, self.thread, math.prod(self.threads), self.uses_thread,
                lambda shape, dtype: _workspace(TensorType(shape, dtype), "kept"),
            )  # fmt: skip
            for part, blocks, thread in cut_at_grid_syncs(whole, launch):
                own = thread if self.uses_thread else None
                body = with_safe_values(part, at.safe_values)
                body = pin_results(gather_roles(body, self.threads, own))
                made = KernelNode(
                    self.grid, blocks, self.threads, body, at.swizzle,
                    own, self.shared_bytes, self.cluster, self.min_blocks,
                )  # fmt: skip
                at.kernels.append(with_span(made, self.span))


def grid_of(sizes: Any) -> tuple[Expr, ...]:
    """Return a grid's sizes as expressions. Raises TileError for a size that is read from memory."""
    grid = shape_of(sizes, "T.Kernel's grid")
    element = next((n for size in grid for n in find(size, Load)), None)
    if element is not None:
        fix = "make it a parameter, n: T.int32, or launch the most blocks and let those too many idle by `if`"
        want = "sizes that are known before the launch"
        raise error("bad_shape", None, what="T.Kernel's grid", want=want, got=repr(element)[:60], fix=fix)
    return grid


def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
    """Visit the blocks in panels, for better reuse in the L2 cache; results do not depend on it. `enable` may be False.

    `order` is "row" or "column" ("col"): along which a panel has `panel_size` blocks. TileLang's "mlx" counts as "row".
    """
    need_choice("use_swizzle", "order", order, ("row", "column", "col", "mlx"))
    if not isinstance(panel_size, int) or panel_size < 1:
        why, fix = f"is {panel_size!r}", "give the blocks of a panel, 1 or more; enable=False leaves it out"
        raise error("bad_argument", None, op="T.use_swizzle", name="panel_size", why=why, fix=fix)
    if enable:
        tracer("T.use_swizzle").swizzle = (panel_size, {"col": "column", "mlx": "row"}.get(order, order))


def annotate_min_blocks_per_sm(n: int) -> None:
    """Ask for at least `n` blocks on a multiprocessor of a GPU at the same time. The default is 1.

    Threads then get no more registers than leave room for `n` blocks, so that one block computes while another waits.
    Results do not depend on it. The schedule report says how many fit. Raises TileError if the threads of `n` blocks
    are more than a multiprocessor runs.
    """
    launch = outermost("T.annotate_min_blocks_per_sm").launch
    most = MOST_THREADS // math.prod(launch.threads)
    if not isinstance(n, int) or not 1 <= n <= most:
        why, fix = f"is {n!r}", f"give a number from 1 to {most}: a multiprocessor runs {MOST_THREADS} threads"
        raise error("bad_argument", None, op="T.annotate_min_blocks_per_sm", name="n", why=why, fix=fix)
    launch.min_blocks = n


def _alloc(scope: str, shape: Any, dtype: Any, what: str, layout: Any = None, offset: int | None = None) -> Handle:
    """Record the allocation of a buffer; return its handle."""
    at = tracer(what)
    given = tuple(map(expand_names, shape_of(shape, f"{what}'s shape")))
    sizes, element, lanes = sized(given, dtype_of(dtype))
    buffer = Buffer("", sizes, element, scope, offset=offset, lanes=lanes)
    request(buffer, layout, at.threads)
    at.emit(Alloc(buffer))
    at.own(buffer)
    return Handle(buffer)


def _scope_of(meant: str, scope: str) -> str:
    """Return the scope `meant` if `scope` is one of its spellings, or "local" for it; else raise TileError."""
    if scope in dt.BY_NAME:  # T.alloc_fragment(64, 64, "float32")
        fix = f"give the shape as one tuple: T.alloc_{meant}((m, n), '{scope}')"
        raise error("bad_argument", None, op=f"T.alloc_{meant}", name="scope", why=f"is the dtype '{scope}'", fix=fix)
    if SPELLINGS.get(scope) not in (meant, "local"):
        known = ", ".join(sorted(name for name, other in SPELLINGS.items() if other == meant))
        raise error("bad_scope", None, got=scope, known=f"{known}; T.alloc_buffer takes other scopes")
    return SPELLINGS[scope]


def alloc_shared(
    shape: Any, dtype: Any = "float32", scope: str = "shared.dyn", layout: Any = None, offset: int | None = None
) -> Handle:
    """Allocate a tile in memory shared by the threads of a block. Content is undefined until written.

    Args:
        shape: an integer or a tuple of integers. Sizes of tensors and scalar parameters may occur: the kernel is then
            compiled at calls, once for each value of these.
        dtype: of the elements.
        scope: one of TileLang's spellings of shared memory; all mean the same. "local" is T.alloc_local.
        layout: as for T.annotate_layout; by default the compiler chooses one.
        offset: the first byte, in printed kernels; the compiler finds it.
    """
    return _alloc(_scope_of("shared", scope), shape, dtype, "T.alloc_shared", layout, offset)


def alloc_fragment(shape: Any, dtype: Any = "float32", scope: str = "local.fragment", layout: Any = None) -> Handle:
    """Allocate a tile in the registers of a block, spread over its threads by layout inference, or by `layout`.

    Args:
        shape: an integer or a tuple of integers, known when the kernel is compiled.
        dtype: of the elements.
        scope: one of TileLang's spellings of registers; all mean the same. "local" is T.alloc_local.
        layout: as for T.annotate_layout; by default the compiler chooses one.
    """
    return _alloc(_scope_of("fragment", scope), shape, dtype, "T.alloc_fragment", layout)


def alloc_local(shape: Any, dtype: Any = "float32", scope: str = "local") -> Handle:
    """Allocate an array of each thread by itself, whose `scope` is "local".

    `shape` is an integer or a tuple of integers, known when the kernel is compiled; `dtype` is of the elements.
    """
    return _alloc(_scope_of("local", scope), shape, dtype, "T.alloc_local")


def alloc_buffer(
    shape: Any,
    dtype: Any = "float32",
    data: Any = None,
    strides: Any = None,
    elem_offset: Any = None,
    scope: str = "global",
    align: int = -1,
    offset_factor: int = 0,
    buffer_type: str = "",
) -> Handle:
    """Allocate memory of a named scope, as in TIR: T.alloc_global, T.alloc_shared, T.alloc_fragment or
    T.alloc_local.

    `align`, `offset_factor` and `buffer_type` are hints without effect. With `data`, a contiguous tensor, it is T.view.
    Raises TileError for `strides` and `elem_offset`.
    """
    for name, given in (("strides", strides), ("elem_offset", elem_offset)):
        if given is not None:
            fix = "leave it out: buffers that are made here are contiguous"
            raise error("bad_argument", None, op="T.alloc_buffer", name=name, why="is given", fix=fix)
    if scope not in SPELLINGS:
        raise error("bad_scope", None, got=scope, known=", ".join(sorted(SPELLINGS)))
    if data is not None:
        return view(data, shape, dtype)
    if SPELLINGS[scope] == "global":
        return alloc_global(shape, dtype)
    if SPELLINGS[scope] in ("var", "barrier"):
        raise error("bad_scope", None, got=scope, known="global, shared, local, local.fragment")
    return _alloc(SPELLINGS[scope], shape, dtype, "T.alloc_buffer")


decl_buffer = alloc_buffer


def alloc_barrier(arrive_count: Any, shape: Any = (1,), offset: int | None = None) -> Handle:
    """Allocate mbarriers in shared memory, each of whose phases waits for `arrive_count` threads or warps.

    A list of equal numbers gives as many mbarriers: `[128] * n` is `128, (n,)`. `offset` is the first byte, in printed
    kernels.
    """
    at = outermost("T.alloc_barrier")
    if isinstance(arrive_count, list | tuple) and len(set(arrive_count)) == 1:
        arrive_count, shape = arrive_count[0], (len(arrive_count),)
    if not isinstance(arrive_count, int) or not 0 < arrive_count < 2**20:
        fix = "arrive_count must be at least 1 and below 2^20, or a list of equal numbers; other ones are another array"
        raise error(
            "bad_argument", None, op="T.alloc_barrier", name="arrive_count", why=f"is {arrive_count!r}", fix=fix
        )
    sizes = shape_of(shape, "T.alloc_barrier's shape")
    buffer = Buffer("", sizes, dt.uint64, "barrier", offset=offset, arrivals=arrive_count)
    at.emit(Alloc(buffer))
    at.own(buffer)
    return Handle(buffer)


def create_list_of_mbarrier(*arrive_counts: Any) -> None:
    """Allocate the mbarriers 0, 1, ... of the kernel, one for each of `arrive_counts`, as older TileLang does.

    T.get_mbarrier gives one of them, and so does its number wherever an mbarrier is wanted.
    """
    at = outermost("T.create_list_of_mbarrier")
    given = list(arrive_counts[0]) if arrive_counts and isinstance(arrive_counts[0], list | tuple) else [*arrive_counts]
    if not given or at.launch in at.mbarriers:
        why = "is empty" if not given else "is the second list of this kernel"
        fix = "give the arrivals of each mbarrier, once in a kernel"
        raise error("bad_argument", None, op="T.create_list_of_mbarrier", name="arrive_counts", why=why, fix=fix)
    if len(set(given)) == 1:
        made = alloc_barrier(given)
        at.mbarriers[at.launch] = [made]
    else:
        at.mbarriers[at.launch] = [alloc_barrier(count) for count in given]


def get_mbarrier(mbarrier: Scalar) -> Load:
    """Return an mbarrier of T.create_list_of_mbarrier by its number."""
    return listed_mbarrier("T.get_mbarrier", mbarrier)


def alloc_cluster_barrier(arrive_count: int | list[int]) -> Handle:
    """Allocate mbarriers as T.alloc_barrier does, for `arrive_count` threads of any blocks of the cluster."""
    if outermost("T.alloc_cluster_barrier").launch.cluster == (1, 1, 1):
        why, fix = "is that of blocks without a cluster", "give T.Kernel cluster_dims, or take T.alloc_barrier"
        raise error("bad_argument", None, op="T.alloc_cluster_barrier", name="arrive_count", why=why, fix=fix)
    made = alloc_barrier(arrive_count)
    tracer("T.alloc_cluster_barrier").of_clusters.add(made.buffer)
    return made


def alloc_var(dtype: Any, init: Scalar | str | None = None, scope: str = "local.var") -> Any:
    """Make a mutable scalar of each thread. It starts at `init`, or at 0; `v = e` and `v += e` in the kernel write it.

    `scope` is "local.var". Of a vector's dtype it is a vector, and `v[0]` a lane. In a loop it starts anew in each
    iteration. An `init` of
    `...` leaves it undefined, as printed kernels have it.
    """
    if isinstance(init, str):  # alloc_var(dtype, "local.var")
        scope, init = init, None
    if isinstance(dtype, tuple | list | int):
        fix = f"T.alloc_var(dtype, init) holds one value; T.alloc_local({dtype!r}, dtype) holds several"
        raise error("bad_argument", None, op="T.alloc_var", name="dtype", why=f"is the shape {dtype!r}", fix=fix)
    if SPELLINGS.get(scope) != "var":
        raise error("bad_scope", None, got=scope, known="local.var")
    to = dtype_of(dtype)
    value = 0 if init is None else init
    if isinstance(value, float) and to.is_integer and not value.is_integer() and not tolerant():
        why, fix = f"is {value}, and the variable holds {to}", "give a whole number, or a dtype of floats"
        raise error("bad_argument", None, op="T.alloc_var", name="init", why=why, fix=fix)
    is_number_of_float = isinstance(value, float) and math.isfinite(value) and to.is_float and to.lanes == 1
    if is_number_of_float and abs(value) > greatest(to).value * (1 + 2**-24):  # 3.4028235e38 is float32's
        why, fix = f"is {value}, which exceeds maximum of {to}", f'give a value that {to} has, or float("inf")'
        raise error("bad_argument", None, op="T.alloc_var", name="init", why=why, fix=fix)
    if to.lanes > 1:
        return VectorVariable(to, value)
    return make_variable("", to, None if value is ... else cast(constant_to_store(value, to, "T.alloc_var"), to))


def empty(*shape: Any, dtype: Any = "float32") -> Handle:
    """Return a tensor allocated at the launch, which the kernel may return: T.empty((M, N), dtype)."""
    sizes: Any = shape
    if len(shape) == 2 and not is_number(shape[1]) and not isinstance(shape[1], Expr):
        sizes, dtype = shape
    elif len(shape) == 1:
        sizes = shape[0]
    at = tracer("T.empty")
    handle = Handle(TensorType(shape_of(sizes, "T.empty's shape"), dtype_of(dtype)).buffer("", "empty"))
    at.made.append(handle.buffer)
    return handle


def alloc_global(shape: Any, dtype: Any = "float32") -> Handle:
    """Allocate scratch memory in global memory, shared by all kernels of the program and freed after it."""
    tracer("T.alloc_global")
    return Handle(_workspace(TensorType(shape_of(shape, "T.alloc_global's shape"), dtype_of(dtype))))


def _workspace(of: TensorType, name: str = "") -> Buffer:
    """Make a buffer of global memory that each launch of the program allocates."""
    buffer = of.buffer(name, "workspace")
    tracer().made.append(buffer)
    return buffer


def dynamic(names: str, dtype: Any = "int32", multiple_of: int = 1) -> Any:
    """Make dimensions known only at run time, by `names`: `m = T.dynamic("m")`, `m, n = T.dynamic("m, n")`.

    `multiple_of` divides all their values: launches check it, and GPU kernels access memory in wider pieces for it.
    """
    found = tuple(Var(n.strip(), dtype_of(dtype), "dim", multiple_of) for n in names_in("T.dynamic", names))
    return found if len(found) > 1 else found[0]


symbolic = dynamic


def const(names: str) -> Any:
    """Make dimensions that an eager kernel learns from arguments, compiled for each value: `M, N = T.const("M, N")`.

    Commas or blanks part the names. A size follows from dimensions or strides of annotated tensors that are linear in
    it: `N`, `N + 1`, `2 * N`. A size that no tensor tells is a TileError. So is a call outside eager kernels.
    """
    return tracer("T.const").consts(", ".join(names_in("T.const", names)))


def names_in(what: str, names: str) -> list[str]:
    """Split names at commas or blanks."""
    found = names.replace(",", " ").split() if isinstance(names, str) else []
    if not found:
        raise error(
            "bad_argument", author_span(), op=what, name="names", why=f"is {names!r}", fix='write "m" or "m, n"'
        )
    return found


# Hints of TileLang's that this compiler does not need: it decides from the kernel itself. They are accepted where
# TileLang accepts them, and have no effect.


def disable_warp_group_reg_alloc() -> None:
    """Hint for equal shares of registers in all roles. No effect: the compiler counts each role's registers."""
    in_kernel("T.disable_warp_group_reg_alloc")


def annotate_producer_reg_dealloc(reg_count: int = 24) -> None:
    """Hint for each producer thread's registers, `reg_count`, a multiple of 8. No effect: the compiler counts them."""
    in_kernel("T.annotate_producer_reg_dealloc")
    check_registers("T.annotate_producer_reg_dealloc", "reg_count", reg_count or 1)


def annotate_consumer_reg_alloc(reg_count: int = 240) -> None:
    """Hint for each consumer thread's registers, `reg_count`, a multiple of 8. No effect: the compiler counts them."""
    in_kernel("T.annotate_consumer_reg_alloc")
    check_registers("T.annotate_consumer_reg_alloc", "reg_count", reg_count or 1)


def annotate_l2_hit_ratio(ratios: Mapping[Any, float]) -> None:
    """Hint for the L2 cache: `ratios` of hits, as `{tensor: share}`. No effect: caches are left as they are."""
    in_kernel("T.annotate_l2_hit_ratio")
    for tensor, ratio in ratios.items():
        _need_tensor("T.annotate_l2_hit_ratio", tensor)
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            why, fix = f"is {ratio!r}", "give a share from 0 to 1"
            raise error("bad_argument", None, op="T.annotate_l2_hit_ratio", name="ratios", why=why, fix=fix)


def annotate_restrict_buffers(*tensors: Any) -> None:
    """Hint that no two of these tensors overlap. No effect: a launch refuses written tensors that overlap others."""
    in_kernel("T.annotate_restrict_buffers")
    for tensor in tensors:
        _need_tensor("T.annotate_restrict_buffers", tensor)


def _need_tensor(what: str, tensor: Any) -> None:
    """Check that an argument is a global tensor."""
    region = region_of(tensor)
    if region is None or region.buffer.scope != "global":
        why, fix = f"are {tensor!r}"[:80], "name tensors, the parameters of the kernel"
        raise error("bad_argument", None, op=what, name="tensors", why=why, fix=fix)
