#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs TileLang's own test functions and example scripts on torch_tile, each with a time limit.

Usage: python .ci/upstream.py KIND ROOT OUT.tsv [--changed]

ROOT is the unpacked sdist. KIND is `tests` (of testing/python), `examples` (the tests of the examples), or `scripts`
(the examples as programs). A GPU is needed.

OUT.tsv has a line for each case: status, seconds, name, and the words of what stopped it. Files run under
`compat.install()`; with `--changed` they run without it, and import lines name torch_tile instead. A child process
runs each share of a file. An error of CUDA ends the child, and another goes on.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
IMPORT = re.compile(r"^( *)(import|from) (tilelang|tvm)((?:\.\w+)*)(?![\w.])( as \w+)?", re.M)
BROKEN = re.compile(r"CUDA error|illegal memory|misaligned address|unspecified launch|device-side assert", re.I)
CONTEXT_LOST = 3  # exit code of a child whose CUDA context an error has spoiled
# Examples for other hardware, programs that only measure, and a fork of another project.
LEFT_OUT = re.compile(r"bitnet|regression_|/amd/|_sm100/|_tcgen05/|sm120|iket|autodd|benchmark")


@dataclass
class Share:
    """Items `first` to `last` of a file, of which `done` have run, and the child process that runs them."""

    file: str
    first: int = 0
    last: int | None = None
    done: int = 0
    pipe: int = -1
    item: str = ""  # what runs now
    since: float = 0.0
    unread: bytes = b""


@dataclass
class Run:
    """The shares that wait and run, and the lines found: status, seconds, name, words."""

    waiting: collections.deque[Share]
    live: dict[int, Share] = field(default_factory=dict)
    short_of_memory: list[Share] = field(default_factory=list)
    lines: list[tuple[str, float, str, str]] = field(default_factory=list)


def with_changed_import(line: re.Match[str]) -> str:
    """Return an import line that names torch_tile where it named tilelang or tvm."""
    indent, verb, package, inner, alias = line.groups()
    whole = "torch_tile.tvm" if package == "tvm" else "torch_tile"
    if verb == "import" and not alias:
        alias = f", {whole} as {package}" if inner else f" as {package}"
    return f"{indent}{verb} {whole}{inner}{alias or ''}"


def described(problem: BaseException) -> tuple[str, str]:
    """Return the status and the words of an exception, with the line that raised it unless we refuse a program."""
    from torch_tile.diagnostics.errors import InternalError, LaunchError, TileError

    ours, seen = (InternalError, LaunchError, TileError), problem
    cause: BaseException | None = problem
    while cause is not None and not isinstance(seen, ours):
        seen, cause = (cause if isinstance(cause, ours) else seen), cause.__cause__ or cause.__context__
    kind, text = type(seen).__name__, str(seen)
    words = f"{kind}: {' | '.join(line.strip() for line in text.splitlines() if line.strip())[:200]}"
    if isinstance(seen, ours):
        return "refused", words
    last = traceback.extract_tb(problem.__traceback__)[-1]
    words += f" @{os.path.basename(last.filename)}:{last.lineno}"
    if "out of memory" in text:
        return "memory", words
    if kind == "ModuleNotFoundError" or "No module named" in text:
        return "missing", words
    return ("wrong" if kind == "AssertionError" else "error"), words


def send(pipe: int, *parts: object) -> None:
    """Write a line to the parent."""
    os.write(pipe, ("\t".join(re.sub(r"\s", " ", str(part)) for part in parts) + "\n").encode())


class Reporter:
    """A plugin of pytest that selects the items of a share and sends a line for each."""

    def __init__(self, share: Share, pipe: int):
        self.share, self.pipe = share, pipe
        self.began, self.is_told = 0.0, False

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keep the items that the share has left."""
        items[:] = items[self.share.first : self.share.last][self.share.done :]

    def pytest_collectreport(self, report: object) -> None:
        """Send a line for a file that cannot be collected."""
        if report.failed:
            words = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            send(self.pipe, "uncollected", 0, f"{self.share.file}::*", " ".join(words)[:200])

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Name the item that begins, so that the parent can end it when its time is over."""
        self.began, self.is_told = time.time(), False
        send(self.pipe, "begins", nodeid)

    def pytest_exception_interact(self, node: object, call: object, report: object) -> None:
        """Send the words of an exception."""
        if report.when != "collect":
            status, words = described(call.excinfo.value)
            self._tell(node.nodeid, status, words)
            if BROKEN.search(words):
                os._exit(CONTEXT_LOST)

    def pytest_runtest_logreport(self, report: object) -> None:
        """Send a pass or a skip."""
        if report.skipped:
            self._tell(report.nodeid, "skip", str(report.longrepr)[-120:])
        elif report.passed and report.when == "call":
            self._tell(report.nodeid, "pass", "")

    def _tell(self, name: str, status: str, words: str) -> None:
        if not self.is_told:
            self.is_told = True
            send(self.pipe, status, f"{time.time() - self.began:.1f}", name, words)


def run_tests(root: str, share: Share, pipe: int) -> None:
    """Run a share by pytest."""
    import pytest

    os.chdir(root)
    sys.path.insert(0, root)
    options = ["--rootdir", root, "-c", "/dev/null", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    pytest.main([*options, f"{root}/{share.file}"], plugins=[Reporter(share, pipe)])


def run_script(root: str, share: Share, pipe: int) -> None:
    """Run a file as a program without arguments."""
    path = os.path.join(root, share.file)
    sys.argv, sys.path[:0] = [path], [os.path.dirname(path), root]
    os.chdir(os.path.dirname(path))
    began, status, words = time.time(), "pass", ""
    send(pipe, "begins", share.file)
    try:
        runpy.run_path(path, run_name="__main__")
        import torch

        torch.cuda.synchronize()
    except SystemExit as end:
        if end.code:
            status, words = "error", f"exit code {end.code}"
    except BaseException as problem:
        status, words = described(problem)
    send(pipe, status, f"{time.time() - began:.1f}", share.file, words)


def start(kind: str, root: str, share: Share, logs: str) -> int:
    """Fork a child that runs a share; its output goes to a file. Return the child's number."""
    share.pipe, write = os.pipe()
    share.since, share.item, share.unread = time.time(), "", b""
    pid = os.fork()
    if pid:
        os.close(write)
        os.set_blocking(share.pipe, False)
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(f"{logs}/{share.file.replace('/', '_')}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (run_script if kind == "scripts" else run_tests)(root, share, write)
        code = 0
    finally:
        os._exit(code)


def read(run: Run, share: Share, is_alone: bool) -> None:
    """Take the lines that a child sent. A case that was short of memory waits, to run beside two others."""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(share.pipe, 65536):
            share.unread += piece
    *lines, share.unread = share.unread.split(b"\n")
    for status, *rest in (line.decode().split("\t") for line in lines):
        share.since = time.time()
        if status == "begins":
            share.item = rest[0]
            continue
        share.item, share.done = "", share.done + (status != "uncollected")
        if status == "memory" and not is_alone and share.last in (None, share.first + 1):
            run.short_of_memory.append(Share(share.file, share.first, share.last))
        else:
            run.lines.append((status, float(rest[0]), rest[1], rest[2]))


def shares(kind: str, root: pathlib.Path, size: int) -> list[Share]:
    """List what is to run. How many items a file has is not known: each file has as many shares as functions need."""
    if kind == "scripts":
        files = (p for p in sorted(root.glob("examples/**/*.py")) if not p.name.startswith("test_"))
        names = (str(p.relative_to(root)) for p in files if re.search(r"__name__ *== *.__main__", p.read_text()))
        return [Share(name) for name in names if not LEFT_OUT.search(name)]
    found = []
    for path in sorted(root.glob(f"{'examples' if kind == 'examples' else 'testing/python'}/**/test_*.py")):
        count = len(re.findall(r"^ *def test_", path.read_text(), re.M))
        if count and "bitnet" not in str(path):
            firsts = range(0, count, size)
            name = str(path.relative_to(root))
            found += [Share(name, first, None if first == firsts[-1] else first + size) for first in firsts]
    return found


def main() -> None:
    """Run all cases, print counts as they come, and write the lines."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("kind", choices=("tests", "examples", "scripts"))
    ask.add_argument("root", type=pathlib.Path)
    ask.add_argument("out", type=pathlib.Path)
    ask.add_argument("--workers", type=int, default=0, help="processes at once; 16 for tests, else 9")
    ask.add_argument("--limit", type=float, default=110, help="seconds for a case")
    ask.add_argument("--logs", default="/tmp/upstream")
    ask.add_argument("--changed", action="store_true", help="change import lines in place of compat.install()")
    asked = ask.parse_args()
    if asked.changed:
        asked.root = pathlib.Path(shutil.copytree(asked.root, tempfile.mkdtemp() + "/changed"))
        for path in asked.root.rglob("*.py"):
            text = path.read_text().replace('importorskip("tilelang', 'importorskip("torch_tile')
            path.write_text(IMPORT.sub(with_changed_import, text))
    root, workers = asked.root.resolve(), asked.workers or (16 if asked.kind == "tests" else 9)
    os.makedirs(asked.logs, exist_ok=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    warnings.simplefilter("ignore")
    import pytest  # noqa: F401
    import torch  # noqa: F401

    import torch_tile.language
    import torch_tile.testing  # noqa: F401
    from torch_tile.compat import install

    if not asked.changed:
        install()

    run = Run(collections.deque(shares(asked.kind, root, 12 if asked.kind == "tests" else 1)))
    shown, is_alone = time.time(), False
    while run.waiting or run.live or run.short_of_memory:
        if not (run.waiting or run.live):
            run.waiting.extend(run.short_of_memory)
            run.short_of_memory, workers, is_alone = [], min(3, workers), True
        while run.waiting and len(run.live) < workers:
            share = run.waiting.popleft()
            run.live[start(asked.kind, str(root), share, asked.logs)] = share
        for pid, share in list(run.live.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            read(run, share, is_alone)
            if not ended and time.time() - share.since <= asked.limit:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(share.pipe)
            del run.live[pid]
            code = os.waitstatus_to_exitcode(status) if ended else 0
            if share.item or not ended:
                name = share.item or share.file
                run.lines.append(("crash" if ended else "time-out", time.time() - share.since, name, ""))
                share.done += 1
            if (share.item or code == CONTEXT_LOST) and asked.kind != "scripts":
                run.waiting.appendleft(share)
        if time.time() - shown > 20:
            shown = time.time()
            counts = dict(collections.Counter(line[0] for line in run.lines))
            print(f"{counts}, {len(run.waiting)} shares wait", flush=True)
        time.sleep(0.02)
    text = (f"{status}\t{seconds:.1f}\t{name}\t{words}\n" for status, seconds, name, words in sorted(run.lines))
    asked.out.write_text("".join(text))
    print("all:", dict(collections.Counter(line[0] for line in run.lines)))


if __name__ == "__main__":
    main()
