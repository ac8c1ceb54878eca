# SPDX-License-Identifier: Apache-2.0

import json

import pytest
import torch

from torch_tile.autotuner import AutoTuner, autotune
from torch_tile.autotuner.result import AutotuneResult, Candidate, Settings, Trial, from_json, reason, to_json, variant
from torch_tile.compiler.cost_model import Estimate
from torch_tile.diagnostics.errors import TileError, error

TRIES = (
    Trial({"block": 64, "dtype": torch.float16}, 0.5, 0.25),
    Trial({"block": 128, "dtype": torch.float16}, 0.25, 0.125),
    Trial({"block": 0}, None, None, "ZeroDivisionError: integer division or modulo by zero"),
    Trial({"block": 32}, 0.75, 0.5, "left early"),
)
RESULT = AutotuneResult("add", 1, TRIES, 0.375)


def test_the_table_has_the_best_first_and_the_reasons():
    assert repr(RESULT).splitlines() == [
        "add: 4 configurations",
        "        ms   model ms  configuration",
        "    0.2500     0.1250  block=128, dtype=torch.float16  <- best",
        "    0.5000     0.2500  block=64, dtype=torch.float16",
        "    0.7500     0.5000  block=32  (left early)",
        "         -          -  block=0  (ZeroDivisionError: integer division or modulo by zero)",
    ]
    assert RESULT.config == TRIES[1].config and RESULT.latency == 0.25
    assert "(defaults)" in repr(AutotuneResult("f", 0, (Trial({}),)))


def test_json_there_and_back():
    text = to_json(RESULT)
    assert json.loads(text)["trials"][1]["config"] == "block=128, dtype=torch.float16"
    assert from_json(text, [t.config for t in TRIES]) == RESULT


def test_reasons_are_one_line():
    assert reason(ValueError("\n  two\nlines")) == "ValueError: two" and reason(KeyError()) == "KeyError"
    assert reason(error("bad_dtype", None, got="x")) == "'x' is not a dtype"


def test_pass_configs_are_the_compilers(lazy):
    function, keywords = variant(lazy, {"block": 3, "pass_configs": {"tl.enable_fast_math": True}})
    assert function.options.fast_math and not lazy.options.fast_math and keywords == {"block": 3}
    assert variant(lazy, {"block": 3}) == (lazy, {"block": 3})


def test_what_the_table_says(lazy):
    made = Candidate({"block": 3}, lazy)
    assert made.seconds == float("inf") and made.trial.estimate is None
    made.estimate = Estimate(2e-3, 1.0, 0, 40, 1.0, 1.0)
    assert made.seconds == 2e-3 and made.trial.estimate == 2.0


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


def test_tilelangs_names(lazy):
    result = AutoTuner.from_kernel(lazy.function, [{"block": 16}]).set_compile_args(out_idx=[-1], target="cpu")
    found = result.run(args=(64,), early_stop=False, enable_grouped_compile=True, benchmark_multi_gpu=False)
    assert found.func is found.kernel and found.libcode == found.kernel.get_kernel_source()
