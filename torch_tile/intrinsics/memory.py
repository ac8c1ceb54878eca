# SPDX-License-Identifier: Apache-2.0
"""Memory operations of one GPU thread and exchanges with its neighbours: copies, barriers, shuffles, atomics.

Each constructor gives the statement or expression; operands that are memory are `Address`es. Matrix loads and stores
are in `matrix.py`. The C++ is in csrc/memory.h, shuffle.h, sync.h and cuda_atomic.h.
"""

from __future__ import annotations

from typing import Any

from torch_tile.hardware import AMPERE, HOPPER
from torch_tile.intrinsics.base import Access, Intrinsic, declare, effect, same
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Call, Expr, cast, to_expr
from torch_tile.ir.stmt import Do, Stmt

# Fences of atomic updates by memory order: (before, after). A fence before the update publishes this thread's earlier
# writes with it. A fence after it lets this thread see the writes published by the update that it has seen.
ORDERS = {
    "relaxed": (False, False), "consume": (False, True), "acquire": (False, True), "release": (True, False),
    "acq_rel": (True, True), "seq_cst": (True, True),
}  # fmt: skip
LOAD_ORDERS = ("relaxed", "consume", "acquire", "seq_cst")
STORE_ORDERS = ("relaxed", "release", "seq_cst")


def elements(call: Call, operand: int, size: int) -> int:
    """Return how many elements of the buffer behind `operand` take `size` bytes (at least 1)."""
    address = call.args[operand]
    assert isinstance(address, Address)
    return max(1, size // address.buffer.dtype.itemsize)


def option(call: Call, n: int = 0) -> int:
    """Return a numeric option."""
    value = call.options[n]
    assert isinstance(value, int)
    return value


# Barriers.


def barrier() -> Do:
    """Make all threads of the block wait for each other; each sees what the others wrote."""
    return effect("barrier")


def warp_barrier() -> Do:
    """Make the 32 threads of a warp wait for each other; each sees what the others wrote."""
    return effect("warp_barrier")


def lanes_barrier() -> Do:
    """Synchronize the active lanes of a warp; each then sees what the others wrote."""
    return effect("lanes_barrier")


def one_lane(first: Expr) -> Expr:
    """Return a condition that holds for one lane of a warp, as `first` does for the warp's first one.

    On a GPU the chip chooses the lane, so that the assembler knows that it is alone.
    """
    return Call("one_lane", (first,), dt.bool_)


# Copies.


def vector_copy(dst: Address, src: Address, size: int, policy: str = "") -> Do:
    """Copy `size` bytes (1, 2, 4, 8, 16; both ends aligned to it) at once; exactly one of the two is a local array.

    `policy` is that of a Load from global memory.
    """
    return effect("vector_copy", dst, src, options=(size, policy) if policy else (size,))


def reads_by(call: Call) -> str:
    """Return the template arguments of a read by vector_copy or cp_async: its bytes, and how caches keep the line."""
    size, *policy = call.options
    return ", ".join([str(size), *(f"tile::Line::{p}" for p in policy)])


def cp_async(dst: Address, src: Address, valid: Any, size: int, policy: str = "") -> Do:
    """Start copying `size` bytes (4, 8, 16) from global to shared memory; bytes from `valid` on become 0.

    With `valid` 0 nothing is read. The copy belongs to the group that the next `cp_async_commit` closes. 16 bytes can
    have a `policy`, that of a Load.
    """
    options = (size, policy) if policy and policy != "no_allocate" else (size,)  # 16 bytes take no room in L1 anyway
    return effect("cp_async", dst, src, cast(to_expr(valid), dt.int32), options=options)


def cp_async_commit() -> Do:
    """Close this thread's group of asynchronous copies."""
    return effect("cp_async_commit")


def cp_async_wait(pending: int) -> Do:
    """Wait until at most `pending` of this thread's newest groups are in flight."""
    return effect("cp_async_wait", options=(pending,))


# Exchange between the threads of a warp.


def shuffle_xor(value: Expr, mask: Any) -> Expr:
    """Return `value` of the lane whose number differs in the bits of `mask`."""
    return Call("shuffle_xor", (value, cast(to_expr(mask), dt.int32)), value.dtype)


def shuffle(value: Expr, lane: Any) -> Expr:
    """Return `value` of lane `lane`."""
    return Call("shuffle", (value, cast(to_expr(lane), dt.int32)), value.dtype)


def shuffle_up(value: Expr, delta: Any) -> Expr:
    """Return `value` of the lane `delta` below; lanes below `delta` keep their own."""
    return Call("shuffle_up", (value, cast(to_expr(delta), dt.int32)), value.dtype)


def shuffle_down(value: Expr, delta: Any) -> Expr:
    """Return `value` of the lane `delta` above; the last `delta` lanes keep their own."""
    return Call("shuffle_down", (value, cast(to_expr(delta), dt.int32)), value.dtype)


def ballot(condition: Expr) -> Expr:
    """Return a bit per lane of the warp, set where `condition` holds."""
    return Call("ballot", (condition,), dt.uint32)


def vote_any(condition: Expr) -> Expr:
    """Return whether `condition` holds in any lane of the warp."""
    return Call("vote_any", (condition,), dt.bool_)


def vote_all(condition: Expr) -> Expr:
    """Return whether `condition` holds in all lanes of the warp."""
    return Call("vote_all", (condition,), dt.bool_)


# Arithmetic on memory, and on packed bytes.


def atomic(address: Address, value: Expr, op: str) -> Expr:
    """Combine `value` into memory in one indivisible step, and return the previous value.

    `op` is "add", "max", "min", "and", "or", "xor" or "exchange".
    """
    return Call("atomic", (address, value), address.buffer.dtype, (op,))


def added(node: Stmt) -> Call | None:
    """Return the call of a statement that only adds to one element of global memory; None for other statements."""
    call = node.call if isinstance(node, Do) else None
    if not isinstance(call, Call) or call.name != "atomic" or call.options != ("add",):
        return None
    address = call.args[0]
    return call if isinstance(address, Address) and address.buffer.scope == "global" else None


def adds_at_once(dtype: dt.DType, capability: int) -> int:
    """Return how many neighbours in global memory one instruction of a GPU adds to; each sum is atomic by itself."""
    if capability >= HOPPER:
        return {dt.float32: 4, dt.float16: 8, dt.bfloat16: 8}.get(dtype, 1)
    return 2 if dtype == dt.float16 else 1


def atomic_add_vector(dst: Address, src: Address, size: int) -> Do:
    """Add `size` bytes of neighbours in a local array to global memory (both ends aligned to it), each atomically."""
    return effect("atomic_add_vector", dst, src, options=(size,))


def atomic_load(address: Address, memory_order: str) -> Expr:
    """Read memory in one step, again at each call. `memory_order`: "relaxed", "acquire" or "seq_cst"."""
    return Call("atomic_load", (address,), address.buffer.dtype, (memory_order,))


def memory_fence() -> Do:
    """Order this thread's memory accesses before the fence ahead of those after it, for all threads of all blocks."""
    return effect("memory_fence")


def arrive_last(counter: Address, count: Any) -> Expr:
    """Arrive at an int32 counter in global memory. Return 1 if this arrival is the last of `count`, else 0.

    Earlier ordered writes count as this arrival's. The last one sees those of all other arrivals. The counter goes from
    0 to `count - 1`, and back to 0.
    """
    return Call("arrive_last", (counter, cast(to_expr(count), dt.int32)), dt.int32)


def at_rank(address: Address, rank: Any) -> Expr:
    """Return the value at a shared-memory address in the block of the cluster that has this rank."""
    return Call("at_rank", (address, cast(to_expr(rank), dt.int32)), address.buffer.dtype)


def store_at_rank(address: Address, value: Expr, rank: Any) -> Do:
    """Store a value at a shared-memory address in the block of the cluster that has this rank."""
    return effect("store_at_rank", address, cast(value, address.buffer.dtype), cast(to_expr(rank), dt.int32))


def dp4a(a: Expr, b: Expr, c: Expr) -> Expr:
    """Return `c` plus the sum of the products of four signed bytes of `a` with those of `b` (all int32)."""
    return Call("dp4a", (a, b, c), dt.int32)


def here(value: Expr) -> Expr:
    """Return `value` in a form that the C++ compiler cannot move: its consequences are computed here, not hoisted."""
    return Call("here", (value,), value.dtype)


# Effects.


def _vector_copy(call: Call) -> tuple[Access, ...]:
    """Return the accesses of vector_copy: it writes one address and reads the other."""
    size = option(call)
    return Access(0, "w", elements(call, 0, size)), Access(1, "r", elements(call, 1, size))


def _atomic_add_vector(call: Call) -> tuple[Access, ...]:
    """Return the accesses of atomic_add_vector: it updates one address and reads the other."""
    size = option(call)
    return Access(0, "rw", elements(call, 0, size)), Access(1, "r", elements(call, 1, size))


def _cp_async(call: Call) -> tuple[Access, ...]:
    """Return the accesses of cp_async, which are asynchronous."""
    size = option(call)
    return Access(0, "w", elements(call, 0, size), True), Access(1, "r", elements(call, 1, size), True)


# Meanings. Shuffles take `[warps, 32]`; an atomic combines the old value with the operand.


def _from_lane(value: Any, lane: Any) -> Any:
    """Return each lane's entry of `value` `[warps, 32]` at `lane` (its own where `lane` leaves the warp)."""
    import numpy as np

    own = np.broadcast_to(np.arange(32), value.shape)
    return np.take_along_axis(value, np.where((lane >= 0) & (lane < 32), lane, own), axis=1)


def _lanes(value: Any) -> Any:
    """Return the lane of each thread of `[warps, 32]`."""
    import numpy as np

    return np.broadcast_to(np.arange(32), value.shape)


def _ballot(condition: Any, options: tuple[object, ...]) -> Any:
    """Return a bit mask of the lanes whose condition holds."""
    import numpy as np

    bits = (condition.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1, keepdims=True)
    return np.broadcast_to(bits.astype(np.uint32), condition.shape)


def _vote(condition: Any, every: bool) -> Any:
    """Return whether all lanes of a warp, or any, have a true condition."""
    import numpy as np

    found = condition.all(axis=1, keepdims=True) if every else condition.any(axis=1, keepdims=True)
    return np.broadcast_to(found, condition.shape)


def _combine(old: Any, value: Any, options: tuple[object, ...]) -> Any:
    """Return the new value of an atomic update."""
    import numpy as np

    names: dict[str, Any] = {
        "add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor, "exchange": lambda a, b: b,
    }  # fmt: skip
    return names[str(options[0])](old, value)


def _dp4a(a: Any, b: Any, c: Any, options: tuple[object, ...]) -> Any:
    """Return the dot product of four int8 pairs, added to an int32."""
    import numpy as np

    x, y, total = (np.ascontiguousarray(v, dtype=np.int32) for v in (a, b, c))
    parts = x.view(np.int8).astype(np.int64) * y.view(np.int8).astype(np.int64)
    return (total + parts.reshape(*x.shape, 4).sum(axis=-1)).astype(np.int32)


def _gpu(name: str, arity: int, header: str, cpu: str = "", **fields: Any) -> None:
    """Declare an intrinsic of GPUs."""
    declare(Intrinsic(name, arity, same, cpu, cuda=fields.pop("cuda", name), header=header, **fields))


_gpu("barrier", 0, "sync.h", convergent="block", sync=Sync.BARRIER, scope=Scope.BLOCK, idle=True)
_gpu("warp_barrier", 0, "sync.h", convergent="warp", sync=Sync.BARRIER, scope=Scope.WARP, idle=True)
_gpu("one_lane", 1, "sync.h", arch=HOPPER, convergent="warp", meaning=lambda first, options: first)
_gpu("lanes_barrier", 0, "sync.h", sync=Sync.BARRIER, scope=Scope.WARP, idle=True)
_gpu(
    "vector_copy", 2, "memory.h", effects=_vector_copy,
    cuda=lambda call: f"{'vector_read' if call.options[1:] else 'vector_copy'}<{reads_by(call)}>",
)  # fmt: skip
_COPY: dict[str, Any] = {"header": "memory.h", "arch": AMPERE, "engine": Engine.COPY}
_gpu("cp_async", 3, **_COPY, effects=_cp_async, cuda=lambda call: f"cp_async<{reads_by(call)}>")
_gpu("cp_async_commit", 0, **_COPY, sync=Sync.COMMIT, idle=True)
_gpu("cp_async_wait", 0, **_COPY, sync=Sync.DRAIN, idle=True)
_WARP = {"header": "shuffle.h", "convergent": "warp"}
_gpu("shuffle_xor", 2, **_WARP, meaning=lambda v, mask, options: _from_lane(v, _lanes(v) ^ mask))
_gpu("shuffle", 2, **_WARP, meaning=lambda v, lane, options: _from_lane(v, lane % 32 + 0 * _lanes(v)))
_gpu("shuffle_up", 2, **_WARP, meaning=lambda v, delta, options: _from_lane(v, _lanes(v) - delta))
_gpu("shuffle_down", 2, **_WARP, meaning=lambda v, delta, options: _from_lane(v, _lanes(v) + delta))
_gpu("ballot", 1, cuda="vote_ballot", **_WARP, meaning=_ballot)
_gpu("vote_any", 1, **_WARP, meaning=lambda c, options: _vote(c, every=False))
_gpu("vote_all", 1, **_WARP, meaning=lambda c, options: _vote(c, every=True))
_gpu(
    "atomic", 2, "cuda_atomic.h", "atomic", cuda=lambda call: f"atomic_{call.options[0]}", meaning=_combine,
    effects=lambda call: (Access(0, "rw", 1),), atomic=True,
)  # fmt: skip
_gpu(
    "atomic_add_vector", 2, "cuda_atomic.h",
    cuda=lambda call: f"atomic_add_vector<{elements(call, 0, option(call))}>",
    meaning=lambda old, value, options: old + value, effects=_atomic_add_vector, atomic=True,
)  # fmt: skip
_gpu(
    "atomic_load", 1, "cuda_atomic.h", "atomic_load", cuda=lambda call: f"atomic_load_{call.options[0]}",
    effects=lambda call: (Access(0, "r", 1),), atomic=True,
)  # fmt: skip
_gpu("memory_fence", 0, "cuda_atomic.h", "memory_fence", sync=Sync.FENCE, scope=Scope.GRID)
_gpu("arrive_last", 2, "cuda_atomic.h", effects=lambda call: (Access(0, "rw", 1),), atomic=True)
_gpu("at_rank", 2, "memory.h", arch=HOPPER, effects=lambda call: (Access(0, "r", 1),))
_gpu("store_at_rank", 3, "memory.h", arch=HOPPER, effects=lambda call: (Access(0, "w", 1),))
_gpu("dp4a", 3, "mma.h", meaning=_dp4a)
_gpu("here", 1, "memory.h", meaning=lambda value, options: value)


# Helpers that only lowered CPU kernels call: the gemm micro-kernel, row reductions, arrivals.
#
# Their meaning is that of the tile op they come from; they live in csrc/cpu_*.h.

CPU_HELPERS = ("cpu_gemm", "cpu_reduce", "cpu_arrive_last")

for _name in CPU_HELPERS:
    declare(Intrinsic(_name, -1, same, _name))
