# SPDX-License-Identifier: Apache-2.0
"""Mistakes in kernels by hand, in mistaken_kernels.txt, some of them by seed: named on their line; mended, no word."""

import linecache
import random
import re
import warnings
from pathlib import Path

import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.jit import warn_of_results
from torch_tile.lowering.common.check import check_kernel, check_limits

TEXT = (Path(__file__).parent / "mistaken_kernels.txt").read_text()
MISTAKES = [part.partition("\n")[::2] for part in TEXT.split("\n== ")[1:]]
SAMPLE = 16


def told_of(text: str, path: Path) -> str:
    """What the checks for an H100 say of the kernel `k` of a program."""
    path.write_text(text)
    linecache.checkcache(str(path))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            names = {"T": T}
            exec(compile(text, str(path), "exec"), names)
            program = names["k"].program
            warn_of_results(program, (), strict=False)
            check_limits(check_kernel(program), Build(Target("cuda", 90), PassOptions()))
        except TileError as problem:
            return str(problem)
    return "\n".join(str(each.message) for each in told)


def fault_of(head: str, text: str, folder: Path) -> str:
    """What is wrong with the answer to a mistake, or to the program without it; empty if nothing is."""
    code, *words = head.partition(": ")[2].split(", ")
    lines = text.split("\n")
    at = next(n for n, line in enumerate(lines) if "#!" in line)
    wrong, right = (part.rstrip() for part in lines[at].split("#!"))
    path = folder / "mistake.py"
    found = told_of("\n".join([*lines[:at], wrong, *lines[at + 1 :]]), path)
    missing = [word for word in words if word not in found]
    if f"[{code}]" not in found or missing:
        return f"{head}: not told: {missing or code}\n{found}"
    if f"{path}:{at + 1}:" not in found and code != "stuck_wait":  # threads hang where they wait
        return f"{head}: line {at + 1} is not named\n{found}"
    indent = wrong[: len(wrong) - len(wrong.lstrip())]
    mended = told_of("\n".join([*lines[:at], indent + right.lstrip(), *lines[at + 1 :]]), folder / "mended.py")
    return f"{head}: the mended program is told of\n{mended}" if mended else ""


def test_some_mistakes(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed).sample(MISTAKES, SAMPLE)
    faults = [fault for head, text in chosen if (fault := fault_of(head, text, tmp_path))]
    assert not faults, "\n\n".join(faults)


def test_a_silent_mistake_is_a_fault(tmp_path: Path) -> None:
    head, text = MISTAKES[0]
    silent = re.sub(r"T.serial\(3\)", "T.serial(5)", text)
    assert "not told" in fault_of(head, silent, tmp_path)
    assert "is told of" in fault_of(head, text.replace("#! for w in T.serial(4)", "#! for w in T.serial(3)"), tmp_path)


def test_each_mistake_has_a_name_of_its_own() -> None:
    assert len(MISTAKES) >= 30 and len({head.partition(":")[0] for head, _ in MISTAKES}) == len(MISTAKES)
