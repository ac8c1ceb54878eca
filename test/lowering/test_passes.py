# SPDX-License-Identifier: Apache-2.0
"""The lists of passes in docs/architecture.md are those that run, in their order."""

import re
from pathlib import Path

from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.lowering import CPU_PASSES, cuda_passes

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text().partition("## A kernel's way")[2]
INSIDE = {"lowering/common/check.py": "check_kernel"}


def listed(text, known):
    """The passes that a list names, in order; a file of `INSIDE` stands for its pass."""
    for file, name in INSIDE.items():
        text = text.replace(file, name)
    return [word for word in re.findall(r"\w+", text) if word in known]


def names_of(passes):
    return [step.__name__ for step, _ in passes]


def test_the_page_lists_the_passes_of_each_target_in_their_order():
    on_cpu, on_gpu, *_ = re.findall(r"```\n(.*?)```", PAGE, re.S)
    of_cpu, of_gpu = names_of(CPU_PASSES), names_of(cuda_passes(Build(Target("cuda", 90))))
    assert listed(on_cpu, {*of_cpu, *of_gpu}) == of_cpu
    assert listed(on_gpu, {*of_cpu, *of_gpu}) == of_gpu
