# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from benchmarks import grouped
from benchmarks.problem import error_of, tolerance_of


@pytest.mark.parametrize("part", ["gate up", "down", "gradient"])
def test_ours_and_torchs_are_what_is_expected(part):
    case = grouped.case("cpu", grouped.Experts(4, 2, 64, 96), 40, part)
    want = case.expected()
    for result in (case.ours(), case.rivals["torch"]()()):
        assert error_of(case.sample(result), want) < 2 * tolerance_of(torch.bfloat16)


def test_no_more_matrices_are_read_than_have_rows():
    found = {p.name: p for p in grouped.problems("cuda")}
    one, many = (found[f"grouped qwen3 30b gate up m{n} bf16"] for n in (1, 2048))
    assert one.bytes == 2.0 * (2 * 8 * 2048 * 768 + 8 * (2048 + 768)) and one.flops == 2.0 * 8 * 2 * 2048 * 768
    assert many.bytes == 2.0 * (2 * 128 * 2048 * 768 + 16384 * (2048 + 768))
