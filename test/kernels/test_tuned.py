# SPDX-License-Identifier: Apache-2.0
"""Shipped cuts: found by device and class of shapes, and every one that is shipped is a tiling of its family."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels import tuned as module
from torch_tile.kernels.attention import spec as attention_spec, tiling as attention_config
from torch_tile.kernels.attention.operands import Operand
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import tiling as gemm_config
from torch_tile.kernels.mla import spec as mla_spec
from torch_tile.kernels.tuned import FOLDER, file_of, read, rows_class, tuned

H200 = Machine(Target("cuda", 90), 132, "NVIDIA H200")
KINDS = {"gemm": gemm_config.Config, "attention": attention_spec.Config, "mla": mla_spec.Config}
PROBLEM = gemm_config.Problem(torch.float16, 1, 4096, 1024, 8192)
ATTENTION = (
    attention_spec.Spec(torch.bfloat16, 128, 128, True, True, False, None, False, True, 8),
    attention_config.Problem(32, 4096, 4096),
)
MLA = mla_spec.Spec(torch.bfloat16, 512, 64, False, False, True, 8), mla_spec.Problem(64, 128, 4096)


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """`ship(family, shape, config)` puts a cut into the H200's file."""
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    module._table.cache_clear()

    def write(family, shape, config):
        (tmp_path / "nvidia_h200.json").write_text(json.dumps({"device": "x", family: {shape: asdict(config)}}))
        module._table.cache_clear()

    yield write
    module._table.cache_clear()


def test_a_shipped_cut_is_taken_for_its_class_on_its_device(ship):
    model = gemm_config.config_for(PROBLEM, H200)
    cut = replace(model, block_k=32, stages=4)
    ship("gemm", gemm_config.shape_class(PROBLEM), cut)
    assert gemm_config.config_for(PROBLEM, H200) == cut
    assert gemm_config.config_for(replace(PROBLEM, m=4000, dtype=torch.bfloat16), H200) == cut
    others = replace(PROBLEM, n=1032), replace(PROBLEM, m=2048), replace(PROBLEM, products=2), replace(PROBLEM, batch=2)
    for other in (*others, replace(PROBLEM, dtype=torch.float32), replace(PROBLEM, m=1, row=True)):
        assert gemm_config.config_for(other, H200) == gemm_config.config_for(other, replace(H200, name=""))
    for machine in (replace(H200, name=""), replace(H200, name="NVIDIA A100")):
        assert gemm_config.config_for(PROBLEM, machine) == model


def test_attention(ship):
    spec, problem = ATTENTION
    cut = attention_spec.Config(64, 32, 256, 3)
    ship("attention", attention_config.shape_class(spec, problem), cut)
    assert attention_config.config_for(spec, problem, H200) == cut
    assert attention_config.config_for(spec, replace(problem, keys=3000), H200) == cut
    for other in (
        replace(spec, causal=False),
        replace(spec, windowed=True),
        replace(spec, mask=Operand("qk", torch.bool)),
    ):
        assert attention_config.config_for(other, problem, H200) != cut
    assert attention_config.shape_class(replace(spec, dtype=torch.float32), problem) is None


def test_mla(ship):
    spec, problem = MLA
    cut = mla_spec.Config(64, 16, 128, 3, split=True)
    ship("mla", mla_spec.shape_class(spec, problem), cut)
    assert mla_spec.config_for(spec, problem, H200) == cut
    assert mla_spec.config_for(spec, problem, H200, splits=1) != cut  # the caller decides
    assert mla_spec.config_for(replace(spec, paged=True), problem, H200) != cut
    assert mla_spec.shape_class(replace(spec, folded=False), problem) is None


def test_names_and_classes(tmp_path):
    assert file_of("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3.json"
    assert [rows_class(n) for n in (1, 3, 64, 200, 256, 257, 4096, 4097)] == [1, 4, 64, 256, 256, 512, 4096, 4352]
    assert read(tmp_path / "none.json") == {}
    assert tuned(gemm_config.Config, "gemm", replace(H200, name="no such GPU"), "1*1x1x1x1") is None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_every_shipped_cut_is_one_of_its_family(path):
    found = read(path)
    assert file_of(found.pop("device")) == path.name and set(found) <= set(KINDS)
    for family, tilings in found.items():
        for shape, cut in tilings.items():
            assert shape and cut.items() <= asdict(KINDS[family](**cut)).items()
