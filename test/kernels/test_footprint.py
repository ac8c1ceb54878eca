# SPDX-License-Identifier: Apache-2.0
"""Footprints of tilings, compared with the shared memory that the compiler allocates for the library's kernels."""

from functools import partial
from itertools import product

import pytest
import torch

from benchmarks import library
from torch_tile.hardware import Target
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.node import find
from torch_tile.jit import JITFunction, compile_program
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import backward, tiling as attention
from torch_tile.kernels.common import compute_dtype, machine_of
from torch_tile.kernels.conv import conv
from torch_tile.kernels.footprint import SPARE, Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm import (
    cut_dequant,
    dequant,
    dequant_rules,
    grouped_scaled_wgrad as wgrad,
    grouped_wgrad,
    int8_rows,
    row_dequant,
    scaled,
    tiling as gemm,
)
from torch_tile.kernels.mla import spec as mla
from torch_tile.kernels.split_k import combine_parts
from torch_tile.lowering import lower_for_gpu

TARGETS = ["sm_80", "sm_90a"]


def join(dtype, width, splits):
    """A case that joins splits: the catalogue has joins of few widths."""

    def call(make):
        part, part_lse = make((splits, 1, 2, 3, width), dtype), make((splits, 1, 2, 3), compute_dtype(dtype))
        combine_parts(
            part, part_lse, make(part.shape[1:], dtype), make(part_lse.shape[1:], part_lse.dtype), machine_of(part)
        )

    return library.Case(f"join {splits} splits of {width} {dtype}", call)


DTYPES, WIDTHS = (torch.float16, torch.float32, torch.float64), (16, 72, 128, 576)
CASES = [case for case in library.catalogue() if "bf16" not in case.name]  # whose tiles are those of fp16
CASES += [join(*sizes) for sizes in product(DTYPES, WIDTHS, (1, 16, 20, 64))]


def of_gemm(config, spec, bulk):
    return gemm.footprint(config, spec.dtype, len(spec.b_transposed), spec.out_dtype, bulk)


def of_gemv(config, spec, bulk):
    return Footprint((Tile(1, config.block_k, 8 * spec.dtype.itemsize, config.stages),))


def of_dequant(config, spec, bulk):
    storage, span = spec.storage, dequant.span_of(spec, config) * config.block_k
    kinds = [kind for kind in (storage.scale, storage.zero) if kind and span]
    factors = [kind.columns(span, storage.group) * kind.dtype.itemsize for kind in kinds]
    count, out = len(storage.transposed), spec.product.out_dtype
    return dequant_rules.footprint(config, spec.operand, count, storage.bits, bulk, storage.coded, factors, out)


FOOTPRINTS = {
    "gemm": of_gemm,
    "split_gemm": of_gemm,
    "cluster_gemm": of_gemm,
    "gemv": of_gemv,
    "grouped_gemm": of_gemm,
    "k_grouped_gemm": lambda config, spec, bulk: grouped_wgrad.footprint(config, spec.dtype, spec.out_dtype, bulk),
    "dequant_gemm": of_dequant,
    "split_dequant_gemm": of_dequant,
    "cluster_dequant_gemm": of_dequant,
    "grouped_dequant_gemm": of_dequant,
    "row_dequant_gemm": row_dequant.footprint,
    "cut_dequant_gemm": cut_dequant.footprint,
    "split_cut_dequant_gemm": cut_dequant.footprint,
    "grouped_scaled_gemm": partial(scaled.footprint, groups=True),
    "k_grouped_scaled_gemm": lambda config, spec, bulk: wgrad.footprint(config, spec.product, bulk),
    "masked_scaled_gemm": partial(scaled.footprint, groups=True),
    "scaled_gemm": scaled.footprint,
    "conv": lambda config, spec, bulk: conv.footprint(config, spec.product, bulk),
    "int8_rows_gemm": int8_rows.footprint,
    "int8_row_gemm": int8_rows.row_footprint,
    "attention": attention.footprint,
    "combine": lambda dtype, part_dtype, latent, sharing, bulk: sharing.footprint(part_dtype, latent),
    "query_gradients": lambda config, spec, bulk: backward.footprint(config, spec, ("dq",), bulk),
    "key_gradients": lambda config, spec, outputs, bulk: backward.footprint(config, spec, outputs, bulk),
    "mla_decode": lambda config, spec, bulk: mla.footprint(config, spec),
    "mla_decode_hopper": lambda config, spec, bulk: mla.footprint(config, spec),
}
FIXED = (
    "attention_fp8",
    "causal_conv1d",
    "cross_entropy_in_place",
    "index_scores",
    "delta_",
    "few_keys_attention",
    "finish_sums",
    "fused_gradients",
    "gated_delta_rule",
    "group_tokens",
    "linear_attention_",
    "nsa_importance",
    "ssd_",
    "ssm_sum_parts",
    "transpose_values",
)  # tiles of one size for each kind of GPU, which must hold them; test/cubins has the smallest GPUs


class Lowered(JITKernel):
    """A kernel after the passes for its GPU, without text: a block's shared bytes, and whether it has bulk copies."""

    def __init__(self, program, build):
        kernels = lower_for_gpu(program, build).kernels
        self.program, self.build = program, build
        self.allocated = max(kernel.shared_bytes for kernel in kernels)
        self.bulk = any(list(find(kernel, TensorMap)) for kernel in kernels)


@pytest.fixture
def lowered(monkeypatch):
    """The launches of a case on a target, whose kernels are lowered but not printed."""

    def compile(self, *args):  # kernels that other tests compiled are not taken, and none is left to them
        return compile_program(self.make(*args).program, (), target, self.options)

    def of(case, name):
        nonlocal target
        target = Target.of(f"cuda:{name}")
        return library.launches(case, target)

    target = None
    monkeypatch.setattr("torch_tile.jit.compile_cuda", lambda program, out_idx, build: Lowered(program, build))
    monkeypatch.setattr(JITFunction, "compile", compile)
    return of


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_what_the_compiler_allocates(case, target, lowered):
    limit = Target.of(f"cuda:{target}").shared_limit
    for launch in lowered(case, target):
        kernel, name = launch.kernel, launch.kernel.program.name
        if name.startswith(FIXED):
            assert kernel.allocated <= limit, launch
            continue
        if name not in FOOTPRINTS:
            assert kernel.allocated <= SPARE, launch
            continue
        found = FOOTPRINTS[name](*launch.choice, bulk=kernel.bulk)
        assert kernel.allocated <= found.bytes, launch
        if found.bytes <= limit:  # else the compiler takes fewer stages
            assert found.bytes - kernel.allocated <= SPARE, launch


def test_tiles_in_other_parts_share_memory():
    tiles = [Tile(64, 64, 16, parts=(Part.BEFORE,)), Tile(64, 64, 16, 3, (Part.LOOP,)), Tile(8, 64, 16)]
    assert Footprint(tuple(tiles)).tile_bytes == (3 * 64 + 8) * 128
    assert Footprint(tuple(tiles), bulk=True).tile_bytes == (4 * 64 + 8) * 128
    threads = [Tile(8, 64, 16, parts=(Part.BEFORE,), bulk=False), Tile(16, 64, 16, parts=(Part.LEAVING,), bulk=False)]
    assert Footprint((*tiles, *threads), bulk=True).tile_bytes == (4 * 64 + 8 + 16) * 128


def test_tiles_begin_where_swizzles_do():
    odd = [Tile(16, 80, 16)] * 3
    assert Footprint((*odd, Tile(16, 16, 16))).tile_bytes == 2 * 3072 + 2560 + 512
    assert Footprint(tuple(odd[:1])).tile_bytes == 2560


def test_bulk_copies_fill_whole_boxes():
    assert Tile(2, 32, 32, 3).boxed == 2 * 1024 + 2 * 128 and Tile(2, 64, 32, 2).boxed == 3 * 1024 + 2 * 128
    assert Tile(8, 64, 32, 2).boxed == Tile(8, 64, 32, 2).bytes and Tile(1, 256, 8, 2).boxed == 512


def test_as_many_stages_as_fit():
    target = Target.of("cuda:sm_80")

    def of(stages):
        return Footprint((Tile(128, 128, 16, stages), Tile(64, 64, 32)))

    room = (target.shared_limit - SPARE - 64 * 64 * 4) // (128 * 128 * 2)
    assert most_stages(of, range(9, 0, -1), target) == room == 4
    assert most_stages(of, (3, 2), target) == 3 and most_stages(of, (9, 8), target) == 0
    assert of(room).fits(target) and not of(room + 1).fits(target)
