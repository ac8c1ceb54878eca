# SPDX-License-Identifier: Apache-2.0
"""Edits of valid command lines, drawn by the seed: each ends with status 2, and names the word and what is meant."""

import random
import re
from collections.abc import Iterator

import pytest

from torch_tile import __main__ as program
from torch_tile.tools import bench, demo, doctor

FILES = {
    "models.py": """
import torch
def make():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
class Net(torch.nn.Module):
    pass
built = torch.nn.Linear(4, 4)
""",
    "kernels.py": """
import torch_tile
@torch_tile.autotune(configs=[{"block": 32}, {"block": 64}])
@torch_tile.jit(out_idx=[-1])
def tuned(n, block=64):
    return None
@torch_tile.jit
def plain(A):
    pass
""",
    "notes.txt": "no Python",
}
VALID = (
    "demo --tokens 64 --select tile --all",
    "bench --size 64 --no-inductor",
    "tune kernels.py:tuned 1024",
    "explain models.py:make --backward --select fastest --html page.html",
    "explain llama",
    "show kernels.py --target cuda:sm_90a --stage infer_layouts --pictures drawn --format svg",
    "doctor --selftest",
    "env",
)
DRAWN = 24  # edits of each line
NEED = (
    r"did you mean|expected|there is no|functions are|choose from|must|give |its options are|takes|it takes|neither|"
    "passes are|is no "
)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Make the files, and let no command run."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    for module, name in ((demo, "demo"), (bench, "bench"), (doctor, "doctor")):
        monkeypatch.setattr(module, name, lambda *args: 0)


def edits_of(line: str) -> Iterator[tuple[str, list[str], str]]:
    """Make each edit of a line: what was done, the words, and the word that the answer names."""
    words = line.split()
    for at, word in enumerate(words):
        before, after = words[:at], words[at + 1 :]
        for edited in typed(word, is_command=at == 0):
            yield "misspelt", [*before, edited, *after], edited
        is_value = at > 0 and words[at - 1].startswith("--") and word[:2] != "--"
        if at == len(words) - 1 and is_value:
            yield "no value", before, before[-1]
    for extra in ("--quick", "extra"):
        yield "extra", [*words, extra], extra


def typed(word: str, is_command: bool) -> Iterator[str]:
    """Yield what may be typed for a word."""
    middle = len(word) // 2
    left_out = word[:middle] + word[middle + 1 :]
    if word.startswith("--"):  # a beginning of a name is valid
        yield word[:3] + "x" + word[3:]
        yield word.replace("-", "_").replace("__", "--", 1) + "s"
    elif word.isdecimal():
        yield from ("-3", "2.5", "many", "0") if not is_command else ()
    elif ":" in word and ".py" in word:
        file, _, name = word.partition(":")
        yield from (file, name, f"{file}:{name}s", f"{file[1:]}:{name}", f"folder:{name}", f"notes.txt:{name}")
        yield from (f"{file}:Net", f"{file}:built", f"{file}:plain")
    elif word.endswith(".py"):
        yield from ("folder", "notes.txt", word[1:], f"{word}:tuned")
    elif word.endswith(".html"):
        yield from ("folder", f"missing/{word}")
    elif word == "drawn":
        yield "notes.txt"
    else:
        yield from (left_out, word + "s")


@pytest.mark.parametrize("line", VALID)
def test_answers_to_mistakes_in_commands(line: str, seed: int, commands, capsys) -> None:
    drawn = list(edits_of(line))
    if line.startswith("tune"):  # a number of a kernel's argument is the kernel's own matter
        drawn = [each for each in drawn if each[2] not in ("-3", "2.5", "many", "0", "extra")]
        drawn += [("none", ["tune", "kernels.py:tuned"], "n"), ("name", ["tune", "kernels.py:tuned", "N=4"], "N")]
    random.Random(seed).shuffle(drawn)
    bad = []
    for kind, words, named in drawn[:DRAWN]:
        try:
            status: object = program.main(words)
        except SystemExit as stop:
            status = stop.code
        except Exception as problem:
            status = f"{type(problem).__name__}: {problem}"
        answer = capsys.readouterr().err.strip().rpartition("error: ")[2]
        is_named = any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", answer) for part in re.split(r":(?!sm)", named))
        if status != 2 or not is_named or not re.search(NEED, answer):
            bad.append(f"{kind} {' '.join(words)}: {status} {answer}")
    assert not bad, "\n".join(bad)


def test_the_version(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        program.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("torch_tile ")
