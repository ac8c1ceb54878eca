# SPDX-License-Identifier: Apache-2.0
import json

import torch

from torch_tile.autotuner.result import AutotuneResult, Try, from_json, to_json

TRIES = (
    Try({"block": 64, "dtype": torch.float16}, 0.5, 0.25),
    Try({"block": 128, "dtype": torch.float16}, 0.25, 0.125),
    Try({"block": 0}, None, None, "ZeroDivisionError: integer division or modulo by zero"),
    Try({"block": 32}, 0.75, 0.5, "left early"),
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
    assert "(defaults)" in repr(AutotuneResult("f", 0, (Try({}),)))


def test_json_there_and_back():
    text = to_json(RESULT)
    assert json.loads(text)["tries"][1]["config"] == "block=128, dtype=torch.float16"
    assert from_json(text, [t.config for t in TRIES]) == RESULT
