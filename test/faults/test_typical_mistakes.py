# SPDX-License-Identifier: Apache-2.0
"""Typical mistakes of authors, in mistakes.txt: each must be named on its line, with the reason and what to write.

A program's head is `== name: word, word`. The words must stand in the message; `#!` ends the line that it must name.
"""

import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from torch_tile.diagnostics.errors import InternalError

HEAD = "import math\nimport numpy as np\nimport torch\nimport torch_tile\nimport torch_tile.language as T\n"
MISTAKES = [part.split("\n", 1) for part in (Path(__file__).parent / "mistakes.txt").read_text().split("== ")[1:]]


@pytest.mark.parametrize(("head", "program"), MISTAKES, ids=[head.partition(":")[0] for head, _ in MISTAKES])
def test_mistake(head: str, program: str, tmp_path: Path) -> None:
    message, lines = message_of(HEAD + program, tmp_path)
    assert message, "the program runs: the mistake is silent"
    wanted = 1 + (HEAD + program).split("#!")[0].count("\n")
    missing = [word for word in head.partition(": ")[2].split(", ") if word.lower() not in message.lower()]
    assert not missing, f"not in the message: {missing}\n{message}"
    assert wanted in lines, f"line {wanted} is not among {lines}\n{message}"


def message_of(text: str, folder: Path) -> tuple[str, list[int]]:
    """What a program's error or warning says, and the lines that it names: in its text, else those of its traceback."""
    path = folder / "mistake.py"
    path.write_text(text)
    names = {"__name__": "mistake", "x": torch.randn(64), "m": torch.randn(32, 32)}
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            exec(compile(text, str(path), "exec"), names)
    except InternalError:
        raise
    except Exception as problem:
        said = [int(line) for line in re.findall(rf"{re.escape(str(path))}:(\d+)", str(problem))]
        frames = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        notes = "".join(f"\n{note}" for note in getattr(problem, "__notes__", ()))
        return f"{type(problem).__name__}: {problem}{notes}", said or frames
    texts = [text for each in told if str(path) in (text := str(each.message))]
    return "\n".join(texts), [
        int(line) for text in texts for line in re.findall(rf"{re.escape(str(path))}:(\d+)", text)
    ]


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 100 and len({head for head, _ in MISTAKES}) == len(MISTAKES)
