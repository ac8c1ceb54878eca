# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

from torch_tile.__main__ import load, main
from torch_tile.tools import Mistake

MODEL = """
import torch
def small():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8)), (torch.randn(3, 8),)
def keywords():
    return torch.nn.Linear(8, 8), (), {"input": torch.randn(3, 8)}
def wrong():
    return 3
def alone():
    return torch.nn.Linear(8, 8), torch.randn(3, 8)
def broken():
    raise ValueError("of my own")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_models.py"
    path.write_text(MODEL)
    return path


def test_explain_a_file(file, capsys) -> None:
    assert main(["explain", f"{file}:small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Inference: ") and lines[1].split()[:2] == ["family", "status"]
    assert any(line.startswith("gemm") and "replaced" in line and "relu" in line for line in lines)
    assert any(line.startswith("norm") and "replaced" in line for line in lines)


def test_explain_a_model_that_reads_globals(tmp_path, capsys) -> None:
    (tmp_path / "with_globals.py").write_text(
        "import torch\nSCALE, FACTOR = torch.tensor(2.0), 3.0\n"
        "def helper(x):\n    return x * FACTOR\n"
        "class Model(torch.nn.Module):\n    def forward(self, x):\n        return helper(x).softmax(-1) * SCALE\n"
        "def make():\n    return Model(), (torch.randn(4, 64),)\n"
    )
    assert main(["explain", f"{tmp_path / 'with_globals.py'}:make"]) == 0
    assert "tile.softmax" in capsys.readouterr().out


def test_explain_the_backward(file, capsys) -> None:
    assert main(["explain", f"{file}:small", "--backward"]) == 0
    assert "backward" in capsys.readouterr().out


def test_explain_as_a_page(file, capsys, tmp_path) -> None:
    page = tmp_path / "out.html"
    assert main(["explain", f"{file}:small", "--select", "fastest", "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {page}"
    assert "subgraphs were timed" in page.read_text()


def test_load_keywords_and_modules(file, monkeypatch) -> None:
    model, args, kwargs = load(f"{file}:keywords")
    assert args == () and model(**kwargs).shape == (3, 8)
    monkeypatch.syspath_prepend(file.parent)
    assert load("my_models:small")[1][0].shape == (3, 8)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpt", "'gpt' is neither llama nor deepseek nor FILE.py:NAME"),
        ("misuse.py:f", "there is no file misuse.py"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("{file}:nothing", "has no function nothing"),
        ("my_model.py:", "is neither llama"),
        (__file__, f"its functions are {__file__}:"),
        (":small", "is neither llama"),
        ("{file}:alone", r"the arguments that alone\(\) returns are a Tensor; they should be a tuple"),
        ("{file}:wrong", r"wrong\(\) should return \(model, arguments\)"),
    ],
)
def test_what_cannot_be_loaded(target: str, message: str, file) -> None:
    with pytest.raises(Mistake, match=message):
        load(target.format(file=file))


def test_errors_of_the_file_itself_are_no_mistakes_of_the_command_line(file, tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="of my own") as found:
        main(["explain", f"{file}:broken"])
    assert type(found.value) is ValueError
    (tmp_path / "imports_nothing.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        main(["explain", "imports_nothing:f"])
    (tmp_path / "kernel.py").write_text("raise ValueError('of my own')\n")
    with pytest.raises(ValueError, match="of my own"):
        main(["show", str(tmp_path / "kernel.py")])


def test_mistakes_on_the_command_line(capsys) -> None:
    for arguments, message in (
        (["explain", "gpt"], "is neither llama"),
        (["demo", "--tokens", "0"], "'0' is no number of at least 1"),
        (["demo", "--tokens", "x"], "'x' is no number of at least 1"),
        (["show", "misuse.py"], "there is no file misuse.py"),
        (["explain", "llama", "--html", "/missing/page.html"], "--html /missing/page.html: there is no such folder"),
        (["explain", "llama", "--html", "/"], "--html /: that is a folder"),
        (["show", __file__, "--target", "nonsense"], "--target nonsense: give 'cpu', 'cuda', 'cuda:sm_90a'"),
        (["show", __file__, "--target", "cpu"], "--target cpu: schedules and layouts are a GPU's"),
        (["show", __file__, "--stage", "flatter"], "--stage flatter: the passes are check_kernel, "),
        (["demo", "--slect", "tile"], "unrecognized arguments: --slect tile; did you mean --select?"),
        (["demo", "--lenght", "5"], "unrecognized arguments: --lenght 5; its options are --tokens, --select, --all"),
        (["doctor", "all"], "unrecognized arguments: all; its options are --selftest"),
        (["env", "--json"], "unrecognized arguments: --json; env takes none"),
        ([], "COMMAND"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_who_reads_the_output_may_leave() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys, torch_tile.__main__ as m\nm.main = lambda: print('much') or 0\nsys.exit(m.run())"
    result = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_help_does_not_import_torch() -> None:
    code = "import sys; from torch_tile.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo" in result.stdout and "explain" in result.stdout and "doctor" in result.stdout
