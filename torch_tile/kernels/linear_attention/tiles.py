# SPDX-License-Identifier: Apache-2.0
"""What kernels of chunked linear attention share: tilings, tensor types, and the places of chunks.

A chunk is a run of times of one sequence. Sequences lie in a batch, or are packed into one after another; a table then
has the first time of each chunk and the number of its times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import LOG2_E, Machine, compute_dtype, dynamic, power_of_two, strided
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.library_jit import library_jit

HEADS = 8  # of a block that sums up decays
MOST_KEYS = 256
FEW_VALUES = 16
FUSED_VALUES = 64  # rows of wgmma
MOST_VALUES = 128
BASE = 32  # times whose triangle is inverted by forward substitution


def most_keys(dtype: torch.dtype) -> int:
    """Return how many columns of a key a block can hold as rows of a state."""
    return MOST_KEYS // 4 if dtype == torch.float64 else MOST_KEYS


@dataclass(frozen=True)
class Config:
    """A tiling: chunks of `chunk` times.

    A state has `keys` rows, all that there are. Tiles have `value_tile` columns of V, and of K `key_tile`, or
    `channel_tile` where channels decay. Pairs of times whose channels decay are found in blocks of `base` times. A
    block of the gradients of keys has the most sums at once. It has `key_columns` of the keys and `key_threads`, and
    takes `key_step` columns of V at a time. `blocks` that find the pairs of chunks shall share a multiprocessor.
    Results of scans that are `staged` leave through shared memory, from where bulk copies take them. With
    `fused_values` outputs come from one scan of blocks with so many values, whose states stay in registers. Packed
    sequences and decaying channels have no such scan. It takes
    sequences in `segments` at once.
    """

    chunk: int = 64
    keys: int = 128
    key_tile: int = 64
    value_tile: int = 32
    base: int = 16
    channel_tile: int = 32
    key_columns: int = 64
    key_step: int = 64
    threads: int = 128
    key_threads: int = 128
    stages: int = 2
    blocks: int = 1
    staged: bool = False
    fused_values: int = 0
    segments: int = 1


@dataclass(frozen=True)
class Spec:
    """Facts that the kernels are compiled for: dtypes, None for absent operands, and the form.

    `vector` divides K, V and the strides of rows. `packed` sequences have a table of chunks. Segments are joined in
    `reverse` for gradients of states. A scan finds the gradients of segments `apart`, from 0, and stores no others.
    Without beta the state adds values as they are, and there is no triangle. If `channels` decay, each channel of the
    keys does so by itself. Heads may have `shared` keys. With `reads` errors are what other keys read from the state
    (RWKV-7); channels decay then.
    """

    dtype: torch.dtype
    g: torch.dtype = torch.float32
    beta: torch.dtype | None = torch.float32
    initial: torch.dtype | None = None
    starts: torch.dtype | None = None
    vector: int = 1
    channels: bool = False
    reads: bool = False
    reverse: bool = False
    apart: bool = False
    shared: bool = False

    @property
    def delta(self) -> bool:
        """Return whether the state learns errors, not values."""
        return self.beta is not None

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of sums and decays."""
        return compute_dtype(self.dtype)

    @property
    def packed(self) -> bool:
        """Return whether the sequences are packed into one."""
        return self.starts is not None


def config_for(dtype: torch.dtype, keys: int, machine: Machine, channels: bool = False, bulk: bool = True) -> Config:
    """Choose chunks and tiles for up to `most_keys` keys; more blocks fit where `bulk` copies move tiles."""
    rows = max(16, power_of_two(keys))
    narrow, some, wide = min(32, rows), min(64, rows), rows > 128  # wide: shared memory is short
    if not machine.is_gpu:
        return Config(32, rows, some, channel_tile=narrow, key_columns=rows, key_step=some, stages=1)
    if dtype == torch.float64:
        return Config(16, rows, narrow, 16, channel_tile=16, key_columns=narrow, key_step=narrow, stages=1)
    if dtype == torch.float32:
        size, threads = (16, 64) if wide else (32, 128)  # with more threads ptxas spills on sm_120a
        config = Config(size, rows, narrow, size, key_columns=some, key_step=narrow, key_threads=threads, stages=1)
        return replace(config, channel_tile=narrow)
    values, stages = (16, 1) if wide else (32, 2)
    size = 32 if wide and channels else 64
    hopper = bulk and machine.target.has_wgmma
    staged = hopper and not (wide or channels)  # their tiles leave no room
    stages = stages if _scan_of_states(size, rows, values, stages, channels, staged).fits(machine.target) else 1
    config = Config(size, rows, some, values, key_columns=some, key_step=narrow, key_threads=256, stages=stages)
    config = replace(config, channel_tile=narrow)
    if not hopper:
        return config
    config = replace(
        config, blocks=4, staged=staged, fused_values=FUSED_VALUES if staged else 0, key_step=some if staged else narrow
    )
    if rows == 128:
        return replace(config, key_columns=128)
    return replace(config, key_threads=128, key_columns=narrow if wide else some)


def scan_config_for(config: Config, machine: Machine, states: int, values: int, packed: bool) -> Config:
    """Choose the narrowest tiles of values for which all blocks of the state scan still run at once.

    A block goes through all chunks in turn. Narrow tiles shorten each turn, and more multiprocessors work. Wide tiles
    load keys less often; the widest are for two warpgroups. Measured for tilings that are `staged`; the others stay.
    states: of all sequences, segments and heads.
    """
    if not config.staged:
        return config
    for tile in (FEW_VALUES, config.value_tile):
        if states * -(-values // tile) <= machine.num_sms:
            return replace(config, value_tile=tile)
    if packed:  # which have one more tile
        return config
    if values <= FUSED_VALUES or states * -(-values // FUSED_VALUES) <= machine.num_sms:
        return replace(config, value_tile=FUSED_VALUES)
    return replace(config, value_tile=MOST_VALUES, threads=2 * config.threads)


def _scan_of_states(chunk: int, keys: int, values: int, stages: int, channels: bool, staged: bool) -> Footprint:
    """Return the shared memory of the kernel with the largest tiles, of 16 bits: the scan of states."""
    loaded = [(chunk, keys)] * (2 if channels else 1) + [(chunk, values), (chunk, chunk)]
    kept = [(keys, values), (chunk, values), (chunk, values), (2, 2 * chunk), (2, keys if channels else 0)]
    kept += [(keys, values), (chunk, values)] if staged else []
    tiles = [Tile(*shape, 16, stages) for shape in loaded] + [Tile(*shape, 16) for shape in kept]
    return Footprint(tuple(tiles))


class Sizes:
    """The run-time sizes of a call, and the types of its tensors."""

    def __init__(self, config: Config, spec: Spec) -> None:
        self.b, self.length, self.h, self.g = T.dynamic("b, length, h, g")
        self.k, self.v = (dynamic(name, spec.vector) for name in ("k", "v"))
        self.slots_of, self.sequences, self.starts_of = T.dynamic("slots_of, sequences, starts_of")
        self.segments = T.dynamic("segments")
        self.state_shape = self.sequences, self.h, self.k, self.v
        self.config, self.spec = config, spec

    @property
    def slots(self) -> Any:
        """Return the number of chunks of a batch's row; packed, the most that there may be."""
        return self.slots_of - 1

    def keys(self, name: str) -> Any:
        """Return the type of a tensor `[B, L, G, K]`."""
        return strided(name, (self.b, self.length, self.g, self.k), self.spec.dtype, multiple=self.spec.vector)

    def values(self, name: str) -> Any:
        """Return the type of a tensor `[B, L, H, V]`."""
        return strided(name, (self.b, self.length, self.h, self.v), self.spec.dtype, multiple=self.spec.vector)

    def like_values(self) -> Any:
        """Return the type of a dense tensor `[B, L, H, V]`."""
        return T.Tensor((self.b, self.length, self.h, self.v), self.spec.dtype)

    def per_time(self) -> Any:
        """Return the type of numbers for each time, `[B, H, padded]`: rows are whole chunks."""
        return T.Tensor((self.b, self.h, dynamic("padded", self.config.chunk)), self.spec.compute)

    def times(self) -> list[Any]:
        """Return the types of g, unless channels decay, and of beta, if there is one, both `[B, L, H]`."""
        spec, shape = self.spec, (self.b, self.length, self.h)
        given = [] if spec.channels else [strided("g", shape, spec.g, unit=False)]
        return given if spec.beta is None else [*given, strided("beta", shape, spec.beta, unit=False)]

    def of_channels(self) -> Any:
        """Return the type of numbers for each channel of a head's keys, `[B, L, H, K]`."""
        return T.Tensor((self.b, self.length, self.h, self.k), self.spec.compute)

    def keys_of_heads(self) -> Any:
        """Return the type of a dense tensor `[B, L, H, K]`."""
        return T.Tensor((self.b, self.length, self.h, self.k), self.spec.dtype)

    def pairs(self) -> Any:
        """Return the type of numbers for each time with the times of its chunk, `[B, L, H, chunk]`."""
        return T.Tensor((self.b, self.length, self.h, self.config.chunk), self.spec.dtype)

    def pairs_of_delta(self) -> list[Any]:
        """Return the types of what only the delta rule has for pairs of times: none without the rule."""
        return [self.pairs()] if self.spec.delta else []

    def reads(self) -> list[Any]:
        """Return the type of keys that only read the state, in a list that is empty without them."""
        return [self.keys("reads")] if self.spec.reads else []

    def later_keys(self) -> list[Any]:
        """Return the types of keys that decay until their chunk's end; none unless channels decay by themselves."""
        return [self.keys_of_heads(), self.of_channels()] if self.spec.channels else []

    def errors(self) -> Any:
        """Return the type of errors, or of the values that are in their place."""
        return self.like_values() if self.spec.delta else self.values("errors")

    def states(self) -> Any:
        """Return the type of states, one for each chunk and one more, which no kernel writes or reads.

        A tensor of so many chunks would ask whether they are 1, which is unknown while sizes are symbols.
        """
        return T.Tensor((self.b, self.slots_of, self.h, self.k, self.v), self.spec.dtype)

    def state_of_sequences(self) -> Any:
        """Return the type of a state for each sequence, in the dtype of sums: `[sequences, H, K, V]`."""
        return T.Tensor(self.state_shape, self.spec.compute)

    def initial(self) -> list[Any]:
        """Return the type of the state before each sequence, in a list that is empty without one."""
        dtype = self.spec.initial
        return [] if dtype is None else [strided("initial", self.state_shape, dtype, unit=False)]

    def states_before_scan(self) -> list[Any]:
        """Return the type of the state before each sequence or segment, in a list that is empty without one."""
        if self.config.segments == 1:
            return self.initial()
        return [] if self.spec.apart else [self.segment_states()]

    def segment_states(self) -> Any:
        """Return the type of the transposed state before each segment, `[sequences, segments, H, V, K]`."""
        return T.Tensor((self.sequences, self.config.segments, self.h, self.v, self.k), self.spec.compute)

    def segment_types(self) -> list[Any]:
        """Return the types of the states that segments add, `[sequences, segments, H, V, K]`, and of their transitions.

        Transitions are `[sequences, segments, H, K, K]`.
        """
        shape = self.sequences, self.segments, self.h
        own = T.Tensor((*shape, self.v, self.k), self.spec.compute)
        return [own, T.Tensor((*shape, self.k, self.k), self.spec.dtype)]

    def gradients_of_rates(self) -> list[Any]:
        """Return the types of the gradients of beta, under the delta rule, and of g, both `[B, L, H]`."""
        spec, shape = self.spec, (self.b, self.length, self.h)
        return [T.Tensor(shape, dtype) for dtype in (spec.beta, spec.g) if dtype is not None]

    def parts_of_sums(self) -> list[Any]:
        """Return the types of sums of each time's products as output and as input, and of what states behind add.

        They come in parts of the keys, `[B, H, parts, L]` and `[B, H, parts, slots + 1]`.
        """
        shape = self.b, self.h, T.dynamic("parts")
        return [T.Tensor((*shape, n), self.spec.compute) for n in (self.length, self.length, self.slots_of)]

    def table(self) -> list[Any]:
        """Return the type of the table of chunks, in a list that is empty without one."""
        return [T.Tensor((self.slots_of, 2), "int32")] if self.spec.packed else []

    def starts(self) -> list[Any]:
        """Return the type of the first times of packed sequences, in a list that is empty without them."""
        spec = self.spec
        return [] if spec.starts is None else [strided("starts", (self.starts_of,), spec.starts, unit=False)]


@T.macro
def place_of(s: Any, table: Any, slot: Any) -> Any:
    """Return the first time of a chunk and the number of its times."""
    if s.spec.packed:
        first, count = table[slot, 0], table[slot, 1]
    else:
        first = slot * s.config.chunk
        count = T.min(s.config.chunk, s.length - first)
    return first, count


@T.macro
def chunks_of(s: Any, starts: Any, block: tuple[Any, ...], columns: int, slots: Any = None) -> Any:
    """Return where a block of a scan works: its sequence, segment, group of keys and first value; and the segment's
    chunks: the sequence's row in the batch, the first chunk and the number of chunks.

    A block has `columns` values. Packed sequences have room for one more chunk each than the times before them fill.
    `slots` are the chunks of a row, if no tensor of the kernel says how many.
    """
    (bx, head, place), size, segments = block, s.config.chunk, s.config.segments
    sequence, segment, group, at = place // segments, place % segments, head // (s.h // s.g), bx * columns
    slots = s.slots if slots is None else slots
    if s.spec.packed:
        begin = T.min(T.max(T.cast(starts[0][sequence], "int32"), 0), s.length)
        end = T.min(T.max(T.cast(starts[0][sequence + 1], "int32"), begin), s.length)
        row, slot, count = 0, begin // size + sequence, T.ceildiv(end - begin, size)
    else:
        run = T.max(T.ceildiv(slots, segments), 0)  # known not to be negative, as bulk stores ask
        row, slot, count = sequence, segment * run, T.max(T.min(run, slots - segment * run), 0)
    return (sequence, segment, group, at), (row, slot, count)


@T.macro
def load_times(s: Any, decays: Any, betas: Any, place: tuple[Any, ...], logs: Any, rates: Any) -> None:
    """Load the decays and betas of a chunk. Times behind its last one neither decay nor add."""
    bz, first, count, head = place
    for i in T.Parallel(logs.shape[0]):
        time = T.min(first + i, s.length - 1)
        logs[i] = T.if_then_else(i < count, decays[bz, head, time], 0.0)
        rates[i] = T.if_then_else(i < count, betas[bz, head, time], 0.0)


@T.macro
def load_decay_sums(s: Any, others: Any, place: tuple[Any, ...], logs: Any, rates: Any) -> None:
    """Sum the log decays of a chunk over its times into `logs`, and load its betas into `rates`.

    others: the operands of `sum_decays`, whose results it stores for sequences that are not packed.
    """
    (bz, first, count, head), compute, at = place, s.spec.compute, len(s.times())
    decays, betas, seen, left = others[at : at + 4]
    for i in T.Parallel(logs.shape[0]):
        time = T.min(first + i, s.length - 1)
        logs[i] = T.if_then_else(i < count, T.cast(others[0][bz, time, head], compute) * LOG2_E, 0.0)
        rate = T.cast(others[1][bz, time, head], compute) if s.spec.delta else 1.0
        rates[i] = T.if_then_else(i < count, rate, 0.0)
    T.cumsum(logs, dim=0)
    for i in T.Parallel(logs.shape[0]):
        inside, log = i < count, logs[i]
        rest = T.exp2(T.if_then_else(inside, logs[T.max(count - 1, 0)] - log, 0.0))
        decays[bz, head, first + i] = log
        betas[bz, head, first + i] = rates[i]
        seen[bz, head, first + i] = T.if_then_else(inside, T.exp2(log), 0.0)
        left[bz, head, first + i] = rest * rates[i]


@T.macro
def begin_state(s: Any, others: Any, state: Any, place: tuple[Any, ...], transposed: bool = False) -> None:
    """Begin a head's state with the initial one, the last of `others`, or with 0 where there is none.

    The state is a tile `[K, V]`, or `[V, K]` if transposed. It has all keys, and values from the last of `place` on.
    """
    T.clear(state)
    if s.spec.initial is not None:
        sequence, head, at = place
        for i, j in T.Parallel(*state.shape):
            key, value = (j, at + i) if transposed else (i, at + j)
            inside = T.logical_and(key < s.k, value < s.v)
            given = others[-1][sequence, head, T.min(key, s.k - 1), T.min(value, s.v - 1)]
            state[i, j] = T.if_then_else(inside, T.cast(given, s.spec.compute), 0.0)


@T.macro
def begin_segment(s: Any, given: Any, state: Any, place: tuple[Any, ...]) -> None:
    """Begin a segment's state `[K, V]` with the transposed one that `join_segments` found, the last of `given`."""
    bz, segment, head, at = place
    for i, j in T.Parallel(*state.shape):
        inside = T.logical_and(i < s.k, at + j < s.v)
        value = given[-1][bz, segment, head, T.min(at + j, s.v - 1), T.min(i, s.k - 1)]
        state[i, j] = T.if_then_else(inside, value, 0.0)


@T.macro
def weigh_times(s: Any, seen: Any, left: Any, count: Any, own: Any, factor: Any) -> Any:
    """Find what each time of a chunk sees of the state before and leaves to the one behind; return what that one keeps.

    seen, left: both as `sum_decays` stores them. Packed, `own` and `factor` get them without the next sequence's times.
    """
    if s.spec.packed:
        for i in T.Parallel(seen.shape[0]):
            own[i] = T.if_then_else(i < count, seen[i], 0.0)
            factor[i] = T.if_then_else(i < count, left[i], 0.0)
    return T.alloc_var(seen.dtype, seen[T.max(count - 1, 0)])


@T.macro
def values_to_add(s: Any, v_tile: Any, inverse: Any, own: Any, said: Any) -> Any:
    """Return the values that a chunk adds to the state: errors `[V, C]`, or given values `[C, V]`.

    said: what the state holds for the chunk's keys, `[V, C]`.
    """
    (size, columns), dtype, compute = v_tile.shape, s.spec.dtype, s.spec.compute
    values = T.alloc_fragment((size, columns), dtype)
    T.copy(v_tile, values)
    if s.spec.delta:
        rest = T.alloc_fragment((columns, size), dtype)
        found = T.alloc_fragment((columns, size), compute)
        for i, j in T.Parallel(columns, size):
            rest[i, j] = T.cast(T.cast(values[j, i], compute) - own[j] * said[i, j], dtype)
        T.gemm(rest, inverse, found, transpose_B=True, clear_accum=True)
    return found if s.spec.delta else values


@T.macro
def add_to_state(s: Any, added: Any, factor: Any, k_tile: Any, state: Any) -> None:
    """Add products of keys and values of a chunk to the transposed state `[V, K]`, each decayed to the chunk's end."""
    columns, size = state.shape[0], k_tile.shape[0]
    weighed = T.alloc_fragment((columns, size), s.spec.dtype)
    for i, j in T.Parallel(columns, size):
        error = added[i, j] if s.spec.delta else T.cast(added[j, i], s.spec.compute)
        weighed[i, j] = T.cast(error * factor[j], s.spec.dtype)
    T.gemm(weighed, k_tile, state)


@T.macro
def advance_state(state: Any, before: Any, own: Any, transition: Any, reverse: bool = False) -> None:
    """Advance the transposed state over a segment; in reverse, its gradient.

    before: a tile in the dtype of products. own, transition: what `scan_segments` found.
    """
    T.copy(state, before)
    T.copy(own, state)
    T.gemm(before, transition, state, transpose_B=reverse)


@T.macro
def store_rows(s: Any, tile: Any, out: Any, place: tuple[Any, ...]) -> None:
    """Store rows of a chunk to a tensor `[B, L, H, ...]`, but those of later sequences."""
    bz, first, count, head, column = place
    rows, columns = tile.shape
    if s.spec.packed:
        for i, j in T.Parallel(rows, columns):
            if i < count:
                out[bz, first + i, head, column + j] = T.cast(tile[i, j], out.dtype)
    else:
        T.copy(tile, out[bz, first : first + rows, head, column : column + columns])


@T.macro
def split(values: Any, row: Any, column: Any, parts: list[Any]) -> None:
    """Write values from (row, column) on as the sum of two tiles of 16 bits, which hold 16 significant bits."""
    high, low = parts
    for i, j in T.Parallel(*high.shape):
        value = values[row + i, column + j]
        rounded = T.cast(value, high.dtype)
        high[i, j] = rounded
        low[i, j] = T.cast(value - T.cast(rounded, values.dtype), low.dtype)


@T.macro
def multiply(left: list[Any], right: list[Any], product: Any) -> None:
    """Multiply two tiles that `split` wrote, but not their low parts, on tensor cores."""
    T.gemm(left[0], right[0], product, clear_accum=True)
    T.gemm(left[0], right[1], product)
    T.gemm(left[1], right[0], product)


@T.macro
def invert_triangle(lower: Any, inverse: Any) -> None:
    """Invert I + lower, which is strictly lower triangular `[C, C]` in shared memory; what is above it has no effect.

    Columns of diagonal blocks are found by forward substitution. Two inverted blocks on the diagonal then give the
    block below the first: of `[[A, 0], [L, B]]` it is `-B^-1 L A^-1`. Where keys are much alike its terms cancel, so
    these products have 16 significant bits.
    """
    size, dtype = lower.shape[0], lower.dtype
    base = min(BASE, size)
    for i, j in T.Parallel(size, size):
        inverse[i, j] = 0.0
    for c in T.Parallel(size):
        begin, column = c // base * base, T.alloc_local((base,), dtype)
        row, run = T.alloc_local((base,), dtype), min(4, base)
        for i in tuple(range(base)):  # Python's numbers: the column stays in registers
            for m in tuple(range(0, i, run)):
                for n in T.vectorized(run):
                    row[m + n] = lower[begin + i, begin + m + n]
            column[i] = T.if_then_else(begin + i == c, 1.0, 0.0)
            for j in tuple(range(i)):
                column[i] -= row[j] * column[j]
            inverse[begin + i, c] = column[i]
    half = base
    while half < size:
        left, right = ([T.alloc_shared((half, half), "bfloat16") for _ in range(2)] for _ in range(2))
        product = T.alloc_fragment((half, half), dtype)
        for begin in tuple(range(0, size, 2 * half)):
            at = begin + half
            split(lower, at, begin, left)
            split(inverse, begin, begin, right)
            multiply(left, right, product)
            split(inverse, at, at, left)
            split(product, 0, 0, right)
            multiply(left, right, product)
            for i, j in T.Parallel(half, half):
                inverse[at + i, begin + j] = -product[i, j]
        half = half * 2


@T.macro
def store_inverse(s: Any, lower: Any, out: Any, place: tuple[Any, ...]) -> None:
    """Store the rows of the inverse of I + lower as `store_rows` does."""
    inverse = T.alloc_shared(lower.shape, s.spec.compute)
    invert_triangle(lower, inverse)
    store_rows(s, inverse, out, place)


@T.macro
def load_rows(s: Any, x: Any, tile: Any, place: tuple[Any, ...]) -> None:
    """Load whole rows of a tensor `[B, L, G, K]` into the dtype of sums; columns behind the last one are 0."""
    bz, first, group = place
    rows, columns = tile.shape
    for i, j in T.Parallel(rows, columns):
        value = x[bz, T.min(first + i, s.length - 1), group, T.min(j, s.k - 1)]
        tile[i, j] = T.if_then_else(j < s.k, T.cast(value, s.spec.compute), 0.0)


@library_jit
def sum_decays(config: Config, spec: Spec) -> Any:
    """Build the kernel for decays from the start of each chunk, exponents of 2, and for betas, both `[B, H, padded]`.

    `seen` and `left` are what each time sees of the state before its chunk, and leaves to the one behind.
    Where channels decay, these decays are 0; without beta, betas are 1. For packed sequences it also writes the table
    of chunks. `chunk_pairs` does all of this where nothing is packed and no channel decays.
    """
    s, compute, size = Sizes(config, spec), spec.compute, config.chunk
    given = s.times()

    @T.prim_func
    def linear_attention_sum_decays(
        *others: [*given, *s.starts(), *s.table()],
        decays: s.per_time(),
        betas: s.per_time(),
        seen: s.per_time(),
        left: s.per_time(),
        slots: T.int32,
        length: T.int32,  # without decays and betas no operand says it
    ):
        with T.Kernel(T.ceildiv(s.h, HEADS), slots, s.b, threads=config.threads) as (bx, slot, bz):
            tile = T.alloc_shared((HEADS, size), compute)
            rates = T.alloc_shared((HEADS, size), compute)
            first = T.alloc_var("int32", 0)
            count = T.alloc_var("int32", 0)
            if spec.packed:
                for n in T.serial(s.starts_of - 1):
                    begin = T.min(T.max(T.cast(others[-2][n], "int32"), 0), length)
                    end = T.min(T.max(T.cast(others[-2][n + 1], "int32"), begin), length)
                    chunk = slot - (begin // size + n)
                    if T.logical_and(chunk >= 0, chunk * size < end - begin):
                        first = begin + chunk * size
                        count = T.min(size, end - first)
                if bx == 0:
                    for i in T.Parallel(2):
                        others[-1][slot, i] = T.if_then_else(i == 0, first, count)
            else:
                first = slot * size
                count = T.min(size, length - first)
            filled = count if spec.packed else size  # times behind the sequence neither decay nor add
            for j, i in T.Parallel(size, HEADS):
                head, time = T.min(bx * HEADS + i, s.h - 1), T.min(first + j, length - 1)
                if spec.channels:
                    tile[i, j] = 0.0
                else:
                    tile[i, j] = T.if_then_else(j < count, T.cast(others[0][bz, time, head], compute) * LOG2_E, 0.0)
                rate = T.cast(others[len(given) - 1][bz, time, head], compute) if spec.delta else 1.0
                rates[i, j] = T.if_then_else(j < count, rate, 0.0)
            T.cumsum(tile, dim=1)
            for i, j in T.Parallel(HEADS, size):
                if j < filled:
                    head, time, inside, log = bx * HEADS + i, first + j, j < count, tile[i, j]
                    rest = T.exp2(T.if_then_else(inside, tile[i, T.max(count - 1, 0)] - log, 0.0))
                    decays[bz, head, time] = log
                    betas[bz, head, time] = rates[i, j]
                    seen[bz, head, time] = T.if_then_else(inside, T.exp2(log), 0.0)
                    left[bz, head, time] = rest * rates[i, j]

    return linear_attention_sum_decays
