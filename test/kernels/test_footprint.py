# SPDX-License-Identifier: Apache-2.0
"""Footprints of tilings, compared with the shared memory that the compiler allocates for the library's kernels."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from torch_tile.codegen.sources import MapArg
from torch_tile.compiler.source_cache import cuda_source
from torch_tile.hardware import Target
from torch_tile.jit import JITFunction, compile_program
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import backward, tiling as attention
from torch_tile.kernels.footprint import SPARE, Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm import byte_planes, dequant, grouped_wgrad, int8_rows, scaled, tiling as gemm
from torch_tile.kernels.mla import spec as mla
from torch_tile.tools import library

TARGETS = ["sm_80", "sm_90a"]
CASES = [case for case in library.catalogue() if "bf16" not in case.name]  # whose tiles are those of fp16
SAMPLE = [(case, TARGETS[n // 7 % 2]) for n, case in enumerate(CASES) if n % 7 == 0]  # all take minutes


def of_gemm(config, spec, bulk):
    return gemm.footprint(config, spec.dtype, len(spec.b_transposed), spec.out_dtype, bulk)


def of_gemv(config, spec, bulk):
    return Footprint((Tile(1, config.block_k, 8 * spec.dtype.itemsize, config.stages),))


def of_dequant(config, spec, bulk):
    storage = spec.storage
    factors = dequant.span_bytes(spec, config)
    return dequant.footprint(config, spec.operand, len(storage.transposed), storage.bits, bulk, storage.coded, factors)


def of_planes(config, spec, bulk):
    storage = spec.storage
    size = storage.scale.dtype.itemsize if storage.group else 0
    return byte_planes.footprint(config, len(storage.transposed), storage.group, size)


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
    "plane_gemm": of_planes,
    "grouped_scaled_gemm": partial(scaled.footprint, groups=True),
    "masked_scaled_gemm": partial(scaled.footprint, groups=True),
    "scaled_gemm": scaled.footprint,
    "int8_rows_gemm": int8_rows.footprint,
    "attention": attention.footprint,
    "query_gradients": lambda config, spec, bulk: backward.footprint(config, spec, ("dq",), bulk),
    "key_gradients": lambda config, spec, outputs, bulk: backward.footprint(config, spec, outputs, bulk),
    "mla_decode": lambda config, spec, bulk: mla.footprint(config, spec),
    "mla_decode_hopper": lambda config, spec, bulk: mla.footprint(config, spec),
}
FIXED = (
    "causal_conv1d",
    "lightning_index",
    "delta_",
    "gated_delta_rule",
    "group_tokens",
    "linear_attention_",
    "ssd_",
)  # tiles of one size for each kind of GPU, which must hold them; test/cubins has the smallest GPUs


@dataclass
class Planned:
    """A kernel of the library as text, with what it was compiled for."""

    name: str
    form: tuple[Any, ...]
    entries: tuple[Any, ...]

    @property
    def bulk(self) -> bool:
        """Whether bulk copies fill its tiles."""
        return any(isinstance(arg, MapArg) for entry in self.entries for arg in entry.args)


@pytest.fixture
def planned(monkeypatch):
    """The launches of a case on a target, whose kernels are printed but not compiled."""

    class TextOnly(JITKernel):
        def __init__(self, program, source, build):
            self.program, self.source, self.build = program, source, build

    def compile_text(program, out_idx, build):
        return TextOnly(program, cuda_source(program, build)[0], build)

    def of(case, target):
        def compile(self, *args):  # kernels that other tests compiled are not taken, and none is left to them
            return compile_program(self.make(*args).program, (), f"cuda:{target}", self.options)

        monkeypatch.setattr("torch_tile.jit.compile_cuda", compile_text)
        monkeypatch.setattr(JITFunction, "compile", compile)
        for launch in library.launches(case, Target.of(f"cuda:{target}")):
            yield Planned(launch.kernel.program.name, launch.choice, launch.kernel.source.entries)

    return of


@pytest.mark.parametrize(("case", "target"), SAMPLE, ids=lambda x: getattr(x, "name", x))
def test_is_what_the_compiler_allocates(case, target, planned):
    limit = Target.of(f"cuda:{target}").shared_limit
    for one in planned(case, target):
        allocated = max(entry.shared_bytes for entry in one.entries)
        if one.name.startswith(FIXED):
            assert allocated <= limit, one
            continue
        if one.name not in FOOTPRINTS:
            assert allocated <= SPARE, one
            continue
        found = FOOTPRINTS[one.name](*one.form, bulk=one.bulk)
        assert allocated <= found.bytes, one
        if found.bytes <= limit:  # else the compiler takes fewer stages
            assert found.bytes - allocated <= SPARE, one


def test_tiles_in_other_parts_share_memory():
    tiles = [Tile(64, 64, 16, parts=(Part.BEFORE,)), Tile(64, 64, 16, 3, (Part.LOOP,)), Tile(8, 64, 16)]
    assert Footprint(tuple(tiles)).tile_bytes == (3 * 64 + 8) * 128
    assert Footprint(tuple(tiles), bulk=True).tile_bytes == (4 * 64 + 8) * 128


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
