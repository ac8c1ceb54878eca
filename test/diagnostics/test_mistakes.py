# SPDX-License-Identifier: Apache-2.0
"""Edits of valid programs, drawn by the seed: no crash, no silence where all is wrong, errors that name the edit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKER = Path(__file__).with_name("mistakes.py")
# Other kinds may give a valid program: another size, an argument that has a default, a tile of another dtype.
NEVER_VALID = {"name", "wrong idiom", "type"}
# Edits of these kinds that are valid: an argument is left out, a shape written as a list, T.const's name changed.
VALID = ("-> 'None'", "-> '[1, 2]'", """'"N"' -> '"text"'""", """'"n"' -> '"text"'""")
# Errors that are not ours: torch's own layers and models, and Python's parser of command lines.
OF_TORCH = {"replace_layers", "explain", "backend", "cli", "layers", "attention_layer", "quantized_layer", "norm_layer"}
# Each reads elements where an index of the author's points; on CPUs such kernels are not checked.
UNCHECKED_INDICES = {("atomics", "value"), ("atomics", "value range")}
# A macro's line writes its parameter, and the error names the tile that the call gives for it.
OTHER_NAMES = {("macros", "missing step")}
# Times of a clock that an author makes long.
LONG = {("tune", "value range"), ("bench", "value range")}


def faults_of(one: dict) -> str:
    """Return what is wrong with the answer to a mistake; "" if nothing is."""
    found, cell = one["found"], (one["place"], one["kind"])
    text, line = found["message"], one["text"].split("\n")[one["line"] - 1]
    if found["error"].startswith("signal"):
        return "" if cell in UNCHECKED_INDICES | LONG else "crashes"
    if not found["error"]:
        is_valid = one["edit"].endswith(VALID)
        return "" if text or one["kind"] not in NEVER_VALID or is_valid else "is silent"
    own = re.findall(r"def (\w+)", one["text"])
    known = {word for part in (*one["words"], *own, line, one["edit"]) for word in re.findall(r"\w+", part)}
    is_named, is_here = bool(known & set(re.findall(r"\w+", text))), one["line"] in found["frames"] + found["lines"]
    if found["from"] == "the author":
        return "" if is_here or is_named else "points elsewhere"
    if found["from"] == "elsewhere" and not re.match(r"\n(error|warning)\[|tile\.|\w+: |torch_tile_kernels::", text):
        return "" if one["place"] in OF_TORCH else "is Python's or torch's own error, from within"
    # By the parameter's name.
    is_named |= is_here and bool(re.search(r"argument:? [`']\w+|^[\w.]+: \w+ |its parameters are", text))
    return "" if is_named or cell in OTHER_NAMES else "names nothing of the line"


def test_answers_to_mistakes(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(MAKER), str(seed), "15", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0 and answers, ran.stderr
    bad = [(fault, one) for one in answers if (fault := faults_of(one))]
    shown = "\n".join(f"{fault}: {one['place']}/{one['kind']} {one['edit']}: {one['found']}" for fault, one in bad)
    assert not bad, shown


ANSWER = {
    "place": "gemm",
    "kind": "name",
    "text": "import torch\nT.coy(a, b)",
    "line": 2,
    "words": ["coy"],
    "edit": "",
    "found": {"error": "TileError", "message": "T has no `coy`", "frames": [2], "lines": [2], "from": "a check"},
}


@pytest.mark.parametrize(
    "found, fault",
    [
        ({}, ""),
        ({"message": "no"}, "names nothing of the line"),
        ({"error": "", "message": ""}, "is silent"),
        ({"error": "", "message": "a warning of `coy`"}, ""),
        ({"error": "signal 11", "message": ""}, "crashes"),
        ({"error": "KeyError", "message": "'coy'", "from": "elsewhere"}, "is Python's or torch's own"),
        ({"message": "no", "from": "the author", "frames": [1], "lines": []}, "points elsewhere"),
    ],
)
def test_faults_are_told_apart(found: dict, fault: str) -> None:
    told = faults_of({**ANSWER, "found": {**ANSWER["found"], **found}})
    assert told.startswith(fault) if fault else not told
