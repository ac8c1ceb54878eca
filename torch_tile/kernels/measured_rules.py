# SPDX-License-Identifier: Apache-2.0
"""List the choices that rest on measurements: a row for each, with the command that measures it again.

The rows of a choice are in order: `verdict` takes the first whose conditions hold. A row counts on targets that have
the feature it names. On others the caller's default counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_tile.hardware import Target


class Source(NamedTuple):
    """A measurement: what follows `python -m benchmarks`, the GPU, the date, and the file in benchmarks/results."""

    command: str
    gpu: str
    date: str
    results: str


COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "multiple of": lambda x, y: x % y == 0,
    "power of": lambda x, y: x > 0 and x == y ** round(math.log(x, y)),
}


@dataclass(frozen=True)
class Rule:
    """One row: the choice, a property of `Target`, conditions (quantity, comparison, number), and what was best."""

    choice: str
    feature: str
    when: tuple[tuple[str, str, float], ...]
    verdict: Any
    source: Source

    def holds(self, target: Target, quantities: dict[str, float]) -> bool:
        """Return whether the target and all conditions fit. Raises KeyError for a quantity that is not given."""
        fits = getattr(target, self.feature)
        return fits and all(COMPARE[how](quantities[name], number) for name, how, number in self.when)


_H200 = "NVIDIA H200"
_FEW = Source('gemm --only "gemm R" --rivals cuBLAS', _H200, "2026-11-23", "h200_few_rows_2026-11-23.txt")
_ONE = Source('gemm --only " V" --rivals cuBLAS', _H200, "2026-11-22", "h200_clusters_2026-11-22.txt")
_BITS = Source('dequant --only "int4 g128"', _H200, "2026-11-22", "h200_clusters_2026-11-22.txt")
_BITS_H100 = Source('dequant --only "int4 g128"', "NVIDIA H100", "2026-11-27", "h100_few_bits_2026-11-27.txt")
_TABLES = Source('dequant --only "nf4,e2m1"', "NVIDIA H100", "2026-11-27", "h100_few_bits_2026-11-27.txt")
_STEPS = Source("scaled_gemm", _H200, "2026-11-30", "h200_float8_steps_2026-11-30.txt")
_COPIED = Source('dequant --only "nf4"', _H200, "2026-11-28", "h200_few_rows_2026-11-28.txt")
_SLICED = Source('dequant --only "int4 g128"', _H200, "2026-11-30", "h200_fields_in_place_2026-11-30.txt")
_MANY_ROWS = Source("dequant", _H200, "2026-11-30", "h200_widths_of_many_rows_2026-11-30.txt")
_TIMED = Source('dequant --only "int4 g128"', _H200, "2026-11-30", "h200_tiles_of_few_rows_2026-11-30.txt")
_LONG = Source('dequant --only "int4,nf4"', _H200, "2026-11-27", "h200_planes_2_2026-11-27.txt")
_WIDE = Source("attention --rivals cuDNN", _H200, "2026-11-21", "h200_hopper_2026-11-21.txt")
_SHORT = Source('attention --only "s512,s197,s1024" --rivals cuDNN', _H200, "2026-11-23", "h200_blocks_2026-11-23.txt")
_PAIRS = Source(
    'attention --only "s1024 causal" --rivals FA4', _H200, "2026-11-29", "h200_attention_pairs_2026-11-29.txt"
)
_EVEN_PAIRS = Source(
    'attention --only "s2048 causal,s4096 causal" --rivals FA4', _H200, "2026-11-29",
    "h200_attention_even_pairs_2026-11-29.txt",
)  # fmt: skip
_AHEAD = Source(
    'attention --only "s512 full,s1024 full" --rivals FA4', _H200, "2026-11-30",
    "h200_attention_queries_ahead_2026-11-30.txt",
)  # fmt: skip
_NEXT = Source(
    'attention --only "s4096 causal,b2 s8192 causal,s4096 full" --rivals FA4', _H200, "2026-11-30",
    "h200_attention_next_tiles_2026-11-30.txt",
)  # fmt: skip
_PLACES = Source(
    'attention --only "b2 s8192 causal,h64/8" --rivals FA4', _H200, "2026-11-30",
    "h200_attention_places_by_lanes_2026-11-30.txt",
)  # fmt: skip
_CACHES = Source("int4_decode", _H200, "2026-11-30", "h200_few_keys_bulk_2026-11-30.txt")
_TURNS = Source("int4_decode", _H200, "2026-11-30", "h200_decode_turns_2026-11-30.txt")
_PAGES = Source('serving --only "pages of 16"', _H200, "2026-11-27", "h200_serving_2026-11-27.txt")
_NARROW = Source("attention_backward --only d64", _H200, "2026-11-23", "h200_scores_2026-11-23.txt")
_CONTESTS = Source("models --rivals Inductor", _H200, "2026-11-22", "h200_schedules_2026-11-22.txt")
_LATENTS = Source("models --only mla --rivals Inductor", _H200, "2026-11-24", "h200_wide_latents_2026-11-24.txt")
_NORMS = Source("models --only encoder,vit,bert,qwen3", _H200, "2026-11-23", "h200_blocks_2026-11-23.txt")
_LAYER = Source("models --only encoder --rivals Inductor", _H200, "2026-11-23", "h200_few_rows_2026-11-23.txt")

# fmt: off
RULES = (
    # A product of few rows as its transpose: columns of wgmma's tile are the rows. `rows` are those of the tile.
    Rule("gemm.transposed", "has_wgmma", (("k", "<", 1024),), False, _FEW),
    Rule("gemm.transposed", "has_wgmma", (("rows", "<=", 16), ("tiles_per_sm", ">=", 3 / 4)), False, _FEW),
    Rule("gemm.transposed", "has_wgmma", (("rows", "==", 48), ("k", "<", 2048)), False, _FEW),
    Rule("gemm.transposed", "has_wgmma", (("rows", "multiple of", 64), ("k", "<", 8192)), False, _FEW),
    Rule("gemm.transposed", "has_wgmma", (("rows", "multiple of", 64), ("tiles_per_sm", ">=", 2 / 5)), False, _FEW),
    Rule("gemm.transposed", "has_wgmma", (), True, _FEW),
    # Blocks for each SM below which the blocks of a cluster share sums of a transposed product.
    Rule("gemm.transposed_blocks", "has_wgmma", (("rows", "<=", 32),), 2 / 5, _FEW),
    Rule("gemm.transposed_blocks", "has_wgmma", (("k", ">=", 8192),), 3 / 5, _FEW),
    # Blocks for each SM with which few rows still read at the rate of memory: a block has a fiftieth of that rate.
    Rule("gemm.least_blocks", "has_clusters", (), 2 / 5, _FEW),
    # A row times a matrix stored [N, K] by the kernel for few rows. Rows 32 KiB apart meet in memory.
    Rule("gemm.row_by_tensor_cores", "has_wgmma", (("k", "<=", 8192),), True, _ONE),
    Rule("gemm.row_by_tensor_cores", "has_wgmma", (("row_bytes", "multiple of", 32768),), True, _ONE),
    # Changes to the tiling of one row times a matrix stored [K, N]: long pieces of rows, all tiles at once.
    Rule("gemm.one_row", "has_clusters", (("tiles_per_sm", ">", 2),), {"block_n": 128, "block_k": 32}, _ONE),
    Rule("gemm.one_row", "has_clusters", (("tiles_per_sm", ">=", 8 / 5),), {"block_n": 128, "block_k": 128}, _ONE),
    Rule("gemm.one_row", "has_clusters", (("tiles_per_sm", ">=", 1), ("k_by_n", ">=", 4)),
         {"block_n": 128, "block_k": 64, "stages": 8}, _ONE),
    # Tiles of few rows that need no shared sums.
    Rule("gemm.few_rows_apart", "has_clusters", (("tiles_per_sm", ">=", 3 / 4),), True, _ONE),
    # Steps of 512 columns of weights of few bits, but of tables: these have steps of 256.
    Rule("dequant.long_steps", "has_wgmma", (("coded", "==", 1),), False, _TABLES),
    Rule("dequant.long_steps", "is_supported", (("rows", "==", 8), ("tiles_per_sm", ">=", 3 / 5), ("group", ">", 0),
         ("bits", ">=", 4), ("k", ">=", 8192)), True, _BITS),
    Rule("dequant.long_steps", "has_wgmma", (("rows", "==", 16), ("tiles_per_sm", ">=", 3 / 5), ("group", ">=", 128),
         ("bits", "==", 4), ("k", ">=", 8192)), True, _LONG),
    # Steps of 256 columns for more than 16 rows, of integers whose sums are scaled in time.
    Rule("dequant.wide_steps", "has_wgmma", (("group", ">=", 128), ("bits", "==", 4), ("coded", "==", 0),
         ("products", "==", 1)), True, _BITS_H100),
    # Two blocks of 64 rows of weights on a multiprocessor, in steps of 512 columns, for few rows of a.
    Rule("dequant.two_blocks", "has_wgmma", (("coded", "==", 1), ("rows", "<=", 16), ("group", ">=", 64),
         ("k", ">=", 8192), ("tiles_per_sm", ">=", 3 / 5), ("products", "==", 1)), True, _COPIED),
    # Tiles of up to 96 rows whose times are known, for integers whose groups hold a step.
    Rule("dequant.timed_tiles", "has_wgmma", (("group", "multiple of", 128), ("group", ">", 0), ("bits", "==", 4),
         ("coded", "==", 0)), True, _TIMED),
    # Two blocks that load a tile of a once, for tiles of many rows.
    Rule("dequant.pairs", "has_wgmma", (("rows", ">", 128),), True, _MANY_ROWS),
    # Slices of K in the places of rows, for few rows of a.
    Rule("dequant.slices", "has_wgmma", (), True, _SLICED),
    # What tiles of float8 products cost (see `scaled.Costs`). `runs`: with scales of runs, `bulk` copies of them.
    Rule("scaled.costs", "has_wgmma", (("runs", "==", 1), ("bulk", "==", 0)),
         {"copied": 0.0107, "multiplied": 0.024, "single": 0.0222, "piece": 0.04, "stored": 0.075, "started": 0.5,
          "far": 1.17}, _STEPS),
    Rule("scaled.costs", "has_wgmma", (("runs", "==", 1),),
         {"copied": 0.0107, "multiplied": 0.0215, "single": 0.0222, "piece": 0.0125, "stored": 0.075, "started": 0.5,
          "far": 1.17}, _STEPS),
    Rule("scaled.costs", "has_wgmma", (),
         {"copied": 0.0108, "multiplied": 0.022, "single": 0.022, "piece": 0.0, "stored": 0.06, "started": 0.5,
          "far": 1.0}, _STEPS),
    # The rate of a row by the rows of a block: three warpgroups share keys and values.
    Rule("attention.rate", "has_wgmma", (("rows", "==", 192),), 1.15, _WIDE),
    # Most keys for which blocks that share an SM win; larger blocks read keys and values half as often.
    Rule("attention.shared_sm_keys", "has_wgmma", (("width", "<=", 64),), 4096, _SHORT),
    Rule("attention.shared_sm_keys", "has_wgmma", (("width", "==", 128), ("waves", "<=", 1)), 512, _SHORT),
    Rule("attention.shared_sm_keys", "has_wgmma", (("causal", "==", 1),), 512, _SHORT),
    Rule("attention.shared_sm_keys", "has_wgmma", (), 384, _SHORT),
    # Whether blocks take a long tile and a short one, by pairs for each SM. The value counts last rounds by length.
    # One or two rounds that are almost full take 5 % less time, three to sixteen 1 to 5 % less.
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 1.9), ("pairs", "<=", 2), ("keys", "==", 2048), ("lse", "==", 1)), 1, _NEXT),
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 3.8), ("pairs", "<=", 4), ("keys", "==", 4096), ("lse", "==", 1)), 2, _NEXT),
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 15), ("pairs", "<=", 16), ("keys", "==", 8192)), 4, _PLACES),
    Rule("attention.rounds_by_length", "has_wgmma", (("lse", "==", 1),), None, _NEXT),
    Rule("attention.rounds_by_length", "has_wgmma", (("pairs", ">=", 0.9), ("pairs", "<=", 1)), 0, _PAIRS),
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 1.9), ("pairs", "<=", 2), ("keys", ">=", 2048), ("keys", "<=", 4096)), 1, _EVEN_PAIRS),
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 3.8), ("pairs", "<=", 8), ("keys", ">=", 2048), ("keys", "<=", 4096)), 2, _EVEN_PAIRS),
    Rule("attention.rounds_by_length", "has_wgmma",
         (("pairs", ">=", 5.8), ("pairs", "<=", 8), ("keys", ">=", 6144), ("keys", "<=", 8192)), 2, _PLACES),
    # Whether blocks take tiles without masks in turn, with queries ahead. That takes 3 to 12 % less time.
    # Of 8192 keys it takes 2 % more.
    Rule("attention.in_order", "has_wgmma", (("waves", ">", 1), ("waves", "<=", 16), ("keys", "<=", 2048)),
         True, _AHEAD),
    Rule("attention.in_order", "has_wgmma", (("waves", ">", 1), ("waves", "<=", 8), ("keys", "<=", 4096)),
         True, _NEXT),
    # Whether blocks take tiles under a causal mask by falling length, of all heads.
    # `cached` is the part of the cache that keys and values of all heads take.
    Rule("attention.by_length", "has_wgmma",
         (("grouped", "==", 1), ("lse", "==", 0), ("cached", "<=", 1), ("waves", ">=", 1.9), ("keys", ">=", 1000),
          ("keys", "<=", 2048)), True, _NEXT),
    Rule("attention.by_length", "has_wgmma",
         (("grouped", "==", 1), ("lse", "==", 0), ("cached", "<=", 1), ("waves", ">=", 8)), True, _PLACES),
    Rule("attention.by_length", "has_wgmma",
         (("grouped", "==", 1), ("lse", "==", 1), ("cached", "<=", 1), ("waves", ">=", 15), ("waves", "<=", 16),
          ("keys", "==", 4096)), True, _NEXT),
    # Whether blocks of decoding share an SM.
    Rule("attention.small_pages", "has_wgmma", (("page", "<", 64), ("waves", ">=", 1)), True, _PAGES),
    # The tiling for few queries whose keys are loaded at once. Keys have 128 columns, and tiles 64 keys. Where clusters
    # hold all keys, they join their parts themselves. Those of blocks that fill a multiprocessor must all find room.
    Rule("attention.few_keys", "has_wgmma", (("keys", ">", 320), ("keys", "<=", 512), ("tiles_per_sm", "<=", 4),
         ("heads_per_sm", ">", 1 / 4), ("keys_by_width", "==", 2), ("masked", "==", 0), ("page", "multiple of", 64)),
         {"keys": 128, "cluster": 4}, _TURNS),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 512), ("masked", "==", 0), ("heads_per_sm", ">", 1 / 4)),
         None, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 256), ("tiles_per_sm", "<=", 2)),
         {"keys": 64, "cluster": 4}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 512), ("tiles_per_sm", "<=", 1)),
         {"keys": 64, "cluster": 8}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 512), ("tiles_per_sm", "<=", 2)),
         {"keys": 128, "cluster": 4}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 512), ("tiles_per_sm", "<=", 4)),
         {"keys": 256, "cluster": 2}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 1024), ("tiles_per_sm", ">", 1), ("tiles_per_sm", "<=", 2),
         ("page", "==", 0)), {"keys": 256, "cluster": 4}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 1024), ("tiles_per_sm", "<=", 4)),
         {"keys": 128, "cluster": 8}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 1024), ("tiles_per_sm", "<=", 8), ("masked", "==", 1),
         ("heads_per_sm", "<=", 1 / 2)), {"keys": 512, "threads": 256, "cluster": 2}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 2048), ("tiles_per_sm", "<=", 3)),
         {"keys": 256, "cluster": 8}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 2048), ("tiles_per_sm", "<=", 4), ("page", ">", 0),
         ("heads_per_sm", "<=", 2 / 9)), {"keys": 256, "cluster": 8}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 2048), ("tiles_per_sm", "<=", 4),
         ("heads_per_sm", "<=", 2 / 9)), {"keys": 512, "threads": 256, "cluster": 4}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 4096), ("tiles_per_sm", "<=", 4),
         ("heads_per_sm", "<=", 1 / 9)), {"keys": 512, "threads": 256, "cluster": 8}, _CACHES),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 8192), ("tiles_per_sm", ">", 5), ("tiles_per_sm", "<=", 8),
         ("masked", "==", 1), ("heads_per_sm", ">", 1 / 9), ("heads_per_sm", "<=", 1 / 5), ("keys_by_width", "==", 1)),
         {"keys": 256}, _TURNS),
    Rule("attention.few_keys", "has_wgmma", (("keys", "<=", 8192), ("tiles_per_sm", "<=", 8), ("masked", "==", 1)),
         {"keys": 128}, _CACHES),
    # Two blocks of keys on an SM in the backward: 0 to 7 % less time, most under a causal mask.
    Rule("attention_backward.shared_sm", "has_wgmma", (("width", "<=", 64),), True, _NARROW),
    # Least share of the products' time that must be saved before our kernel wins without a contest. Our products are
    # within 3 % of ATen's. Attention is compared with two products, which may run at 1.5 times its rate.
    Rule("gemm.saved", "has_wgmma", (("rows", ">=", 1024), ("columns", ">=", 1024), ("columns", "multiple of", 64),
         ("inner", "multiple of", 64)), 0.06, _CONTESTS),
    Rule("attention.saved", "has_wgmma", (), 1.0, _CONTESTS),
    Rule("mla_decode.saved", "has_wgmma", (("latent", "power of", 2),), 1.0, _LATENTS),
    # Norms that Inductor keeps: it holds these rows in registers, too. Of 21 contests our kernel won two.
    Rule("norm.kept", "has_wgmma", (("width", "power of", 2), ("width", "<=", 2048), ("bytes", "<=", 1 << 25)),
         True, _NORMS),
    # Least share of attention in an encoder layer's products for which torch's fused layer is written out. At 0.08 ours
    # took 0.97 to 1.02 of its time.
    Rule("encoder_layer.written_out", "has_wgmma", (), 0.1, _LAYER),
)
# fmt: on

_BY_CHOICE: dict[str, list[Rule]] = {}
for _rule in RULES:
    _BY_CHOICE.setdefault(_rule.choice, []).append(_rule)


def verdict(choice: str, target: Target, default: Any, **quantities: float) -> Any:
    """Return what was best for these quantities on a target, else `default`. KeyError for a missing quantity."""
    return next((rule.verdict for rule in _BY_CHOICE.get(choice, ()) if rule.holds(target, quantities)), default)
