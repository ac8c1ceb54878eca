# SPDX-License-Identifier: Apache-2.0
import io
import time
from types import SimpleNamespace

import pytest

from torch_tile.diagnostics import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def await_words(self, words: str) -> None:
        """Wait until the clock's thread has written, which a busy machine may run late."""
        end = time.perf_counter() + 20
        while words not in self.getvalue() and time.perf_counter() < end:
            time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "STEP", 0.01)
    return made


def test_a_long_wait_is_shown_and_taken_away(terminal) -> None:
    with progress.waiting("compiling"), progress.waiting("inside"):
        terminal.await_words("compiling ... 0 s")
    text = terminal.getvalue()
    assert "torch_tile: compiling ... 0 s" in text and "inside" not in text and text.endswith("\r\x1b[K")


def test_a_short_wait_is_not_shown(terminal, monkeypatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.waiting("compiling"):
        pass
    assert terminal.getvalue() == ""


def test_a_failure_passes_and_frees_the_line(terminal) -> None:
    with pytest.raises(KeyError), progress.waiting("one"):
        raise KeyError
    with progress.waiting("another"):
        terminal.await_words("another")
    assert "another" in terminal.getvalue()


def test_quiet_elsewhere(monkeypatch) -> None:
    made = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.waiting("compiling"):
        time.sleep(0.05)
    assert made.getvalue() == ""


def test_a_clock_of_a_tool_has_the_line_for_itself(terminal) -> None:
    with progress.only_clock(), progress.waiting("compiling"):
        time.sleep(0.1)
    assert terminal.getvalue() == ""
    with progress.waiting("compiling"):  # the line is free again
        terminal.await_words("compiling")
    assert "compiling" in terminal.getvalue()


@pytest.mark.parametrize("columns", [20, 30, 200])
def test_a_narrow_terminal_cuts_the_words(columns: int, monkeypatch) -> None:
    """A line that wraps would not be overwritten by the next one."""
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=columns))
    text = progress.clock_line("computing what takes very long", time.perf_counter())
    assert text.startswith("\rcomputing") and text.endswith(" ... 0 s") and len(text) - 1 < columns
