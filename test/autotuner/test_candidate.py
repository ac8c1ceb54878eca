# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.autotuner import autotune
from torch_tile.autotuner.candidate import Candidate, Settings, reason, variant
from torch_tile.autotuner.cost_model import Estimate
from torch_tile.diagnostics.errors import TileError, error


def test_reasons_are_one_line():
    assert reason(ValueError("\n  two\nlines")) == "ValueError: two" and reason(KeyError()) == "KeyError"
    assert reason(error("bad_dtype", None, got="x")) == "'x' is not a dtype"


def test_pass_configs_are_the_compilers(lazy):
    function, keywords = variant(lazy, {"block": 3, "pass_configs": {"tl.enable_fast_math": True}})
    assert function.options.fast_math and not lazy.options.fast_math and keywords == {"block": 3}
    assert variant(lazy, {"block": 3}) == (lazy, {"block": 3})


def test_what_the_table_says(lazy):
    made = Candidate({"block": 3}, lazy)
    assert made.seconds == float("inf") and made.tried.estimate is None
    made.estimate = Estimate(2e-3, 1.0, 0, 40, 1.0, 1.0)
    assert made.seconds == 2e-3 and made.tried.estimate == 2.0


def test_effort():
    assert Settings().effort == Settings(cache_input_tensors=True, timeout=3).effort
    others = {"rep": 3}, {"early_stop": False}, {"prune": None}, {"ref_prog": print}
    assert len({Settings(**other).effort for other in others} | {Settings().effort}) == 5
    assert not Settings(ref_prog=print, skip_check=True).checks


def test_misspelt_settings_are_refused():
    with pytest.raises(TileError, match="did you mean ref_prog"):
        autotune(configs=[{}], ref_program=None)
    with pytest.raises(TileError, match="give one of warmup"):
        Settings().changed("AutoTuner", {"zzz": 1})
    assert Settings().changed("autotune", {"warmup": 3}) == Settings(warmup=3)
