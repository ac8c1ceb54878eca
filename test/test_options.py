# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import TileError
from torch_tile.options import TILELANGS, PassConfigKey, pass_options


def test_keys_are_tilelangs_names():
    assert PassConfigKey.TL_ENABLE_FAST_MATH == "tl.enable_fast_math"
    assert PassConfigKey.TIR_DISABLE_VECTORIZE == "tir.disable_vectorize"
    key = PassConfigKey.TL_DISABLE_WARP_SPECIALIZED
    assert key.value == "tl.disable_warp_specialized" and type(key.value) is str
    assert key.name == "TL_DISABLE_WARP_SPECIALIZED" and {key.value: True} == {key: True}
    assert PassConfigKey.TIRX_DISABLE_CSE_TIR == "tirx.disable_cse_tir"


def test_dunder_names_are_not_keys():
    with pytest.raises(AttributeError):
        PassConfigKey.__wrapped__


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, PassOptions()),
        ({"strict": True}, PassOptions(strict=True)),
        ({"pass_configs": {PassConfigKey.TL_ENABLE_FAST_MATH: True}}, PassOptions(fast_math=True)),
        (
            {"pass_configs": {"tl.enable_fast_math": False, "tl.Simplify": {}}},
            PassOptions(),
        ),
        ({"pass_configs": {PassConfigKey.TL_DISABLE_FAST_MATH: False}}, PassOptions(fast_math=True)),
        ({"pass_configs": {PassConfigKey.TL_ENABLE_TF32: True, "tl.strict": 1}}, PassOptions(strict=True, tf32=True)),
        ({"compile_flags": ["-O3", "--use_fast_math"]}, PassOptions(fast_math=True)),
        ({"compile_flags": "-O3 -DX"}, PassOptions()),
        ({"verbose": True, "execution_backend": "nvrtc", "target_host": None, "debug_root_path": "."}, PassOptions()),
    ],
)
def test_switches(options, wanted):
    assert pass_options("jit", **options) == wanted


def test_switches_stand_unless_they_are_named():
    base = PassOptions(strict=True, fast_math=True, tf32=True)
    assert pass_options("jit", base) == base
    assert pass_options("jit", base, pass_configs={"tl.enable_fast_math": False}) == PassOptions(True, False, True)
    assert pass_options("jit", base, pass_configs={"tl.strict": False}) == PassOptions(False, True, True)
    assert pass_options("jit", base, pass_configs={"tl.enable_tf32": 0}) == PassOptions(True, True, False)


def test_misspelt_options_are_refused():
    with pytest.raises(TileError, match=r"jit: argument `num_warps` is not an option[\s\S]*threads=128"):
        pass_options("jit", num_warps=4)
    with pytest.raises(TileError, match=r"jit: argument `pass_config` is not an option[\s\S]*mean pass_configs\?"):
        pass_options("jit", pass_config={})
    with pytest.raises(TileError, match="give one of out_idx, target"):
        pass_options("jit", zzz=1)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("tl.enable_fastmath", "'tl.enable_fast_math'"),
        (PassConfigKey.TL_DISABLE_WARP_SPECIALISED, "'tl.disable_warp_specialized'"),
        (PassConfigKey.TL_STRICTT, "'tl.strict'"),
        ("zzz", "leave it out; those that matter are tl.enable_fast_math"),
    ],
)
def test_misspelt_keys_are_refused(key, near):
    with pytest.raises(TileError, match="which nobody knows") as caught:
        pass_options("jit", pass_configs={key: True})
    assert near in str(caught.value)


def test_all_keys_of_tilelang_are_accepted():
    assert pass_options("jit", pass_configs=dict.fromkeys(TILELANGS.split(), 0)) == PassOptions()
    assert len(TILELANGS.split()) >= 50
