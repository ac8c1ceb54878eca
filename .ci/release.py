#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist and the wheel, checks their contents, and tries the wheel on every Python found.

Usage: python .ci/release.py [--out dist] [--python PYTHON ...] [--pip OPTION ...]
       python .ci/release.py --check FILE.whl FILE.tar.gz ...     looks only at archives that exist

Each Python gets a fresh virtual environment with the wheel and what it depends on. There the script imports the
package, runs a kernel and an operator, and finds the backend. Nothing is uploaded.
--pip passes an option to each `pip install`. For torch without CUDA:
    --pip=--extra-index-url=https://download.pytorch.org/whl/cpu
"""

import argparse
import ast
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[1]
MINORS = (11, 12, 13, 14)
"""Minor versions of Python 3 that a release supports, as the classifiers of pyproject.toml list them."""

SMOKE = """
import sys
import torch, torch_tile
import torch_tile.language as T

assert torch_tile.__version__ == sys.argv[1], torch_tile.__version__

@torch_tile.jit
def add(n):
    @T.prim_func
    def kernel(a: T.Tensor((n,), "float32"), b: T.Tensor((n,), "float32"), c: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64)) as block:
            for i in T.Parallel(64):
                c[block * 64 + i] = a[block * 64 + i] + b[block * 64 + i]
    return kernel

a, b, c = torch.randn(100), torch.randn(100), torch.empty(100)
add(100)(a, b, c)
torch.testing.assert_close(c, a + b)
x, weight = torch.randn(5, 7), torch.randn(3, 7)
torch.testing.assert_close(torch.ops.tile.linear(x, weight), torch.nn.functional.linear(x, weight))
assert "tile" in torch._dynamo.list_backends(), "torch.compile does not find the backend"
"""


def source_version(text: str) -> str:
    """The version that torch_tile/__init__.py assigns."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ValueError("no __version__ is assigned")


def wrong_in_wheel(files: Mapping[str, str], version: str, headers: Iterable[str]) -> list[str]:
    """What is wrong with a wheel: its members with their text, where that matters, and the names of csrc/."""
    info = f"torch_tile-{version}.dist-info"
    wanted = {"torch_tile/__init__.py", "torch_tile/py.typed", "torch_tile/language/__init__.pyi", "torch_tile_logs.py"}
    wanted |= {f"torch_tile/csrc/{name}" for name in headers}
    wanted |= {f"{info}/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}
    found = [f"{name} is missing" for name in sorted(wanted - files.keys())]
    tops = {name.split("/")[0] for name in files} - {"torch_tile", "torch_tile_logs.py", info}
    found += [f"{name} does not belong into it" for name in sorted(tops | built(files))]
    entries = files.get(f"{info}/entry_points.txt", "")
    found += [
        f"entry point {name} is missing" for name in ("torch_dynamo_backends", "tile_logs") if name not in entries
    ]
    metadata = files.get(f"{info}/METADATA", "")
    found += [
        f"{line!r} is not in METADATA" for line in (f"Version: {version}", "Name: torch_tile") if line not in metadata
    ]
    return found


def wrong_in_sdist(names: Iterable[str], version: str, headers: Iterable[str]) -> list[str]:
    """What is wrong with the members of an sdist."""
    root = f"torch_tile-{version}/"
    files = {name.removeprefix(root) for name in names if name.startswith(root)}
    wanted = {"pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", "torch_tile/__init__.py"}
    wanted |= {f"csrc/{name}" for name in headers}
    found = [f"{name} is missing" for name in sorted(wanted - files)]
    found += [f"{name} is not below {root}" for name in sorted(names) if not name.startswith(root)]
    large = {name for name in files if name.startswith("benchmarks/results/") or name == "docs/perf-log.md"}
    return found + [f"{name} does not belong into it" for name in sorted(large | built(files))]


def built(names: Iterable[str]) -> set[str]:
    """Members that a build or a run left behind."""
    return {
        name for name in names if re.search(r"(^|/)(__pycache__|\.\w+_cache|\.hypothesis)/|\.(pyc|so|o|cubin)$", name)
    }


def pythons(search: Iterable[str], folders: Iterable[pathlib.Path]) -> dict[int, str]:
    """The newest interpreter of each supported minor version: `search` by name, then folders of versions (pyenv)."""
    found = {}
    for minor in MINORS:
        own = [f for f in folders if re.match(rf"3\.{minor}\.\d+$", f.name) and (f / "bin/python").exists()]
        newest = max(own, key=lambda f: int(f.name.rsplit(".", 1)[1]), default=None)
        named = next((path for path in search if pathlib.Path(path).name == f"python3.{minor}"), None)
        if named or newest:
            found[minor] = named or str(newest / "bin/python")
    return found


def found_pythons() -> dict[int, str]:
    """Interpreters on PATH and of pyenv."""
    search = [path for minor in MINORS if (path := shutil.which(f"python3.{minor}"))]
    works = [path for path in search if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
    pyenv = pathlib.Path.home() / ".pyenv/versions"
    return pythons(works, sorted(pyenv.iterdir()) if pyenv.is_dir() else [])


def check(path: pathlib.Path, version: str) -> list[str]:
    """What is wrong with an archive."""
    headers = [file.name for file in (ROOT / "csrc").glob("*.*")]
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            texts = (".txt", "METADATA")
            files = {n: wheel.read(n).decode() if n.endswith(texts) else "" for n in wheel.namelist()}
        return wrong_in_wheel(files, version, headers)
    with tarfile.open(path) as sdist:
        return wrong_in_sdist([m.name for m in sdist.getmembers() if m.isfile()], version, headers)


def environment(folder: pathlib.Path, python: str, pip: list[str], *packages: str) -> str:
    """A fresh virtual environment with packages; its interpreter."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin/python")
    subprocess.run([own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pip, *packages], check=True)
    return own


def main() -> int:
    """Build, check and try; the number of failures."""
    parser = argparse.ArgumentParser(description="Build and check a release.")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", help="an interpreter to try (default: all of 3.11 to 3.14 found)")
    parser.add_argument("--pip", action="append", default=[], help="an option of each `pip install`")
    parser.add_argument("--check", nargs="+", type=pathlib.Path, help="only check these archives")
    given = parser.parse_args()
    version = source_version((ROOT / "torch_tile/__init__.py").read_text())
    failures = 0
    with tempfile.TemporaryDirectory(prefix="torch_tile_release.") as scratch:
        room = pathlib.Path(scratch)
        if not given.check:
            builder = environment(room / "build", sys.executable, given.pip, "build", "hatchling>=1.25")
            # The wheel is built from the sdist, which so proves to be complete.
            subprocess.run([builder, "-m", "build", "-n", "-o", str(given.out), str(ROOT)], check=True, cwd=room)
        archives = given.check or [given.out / f"torch_tile-{version}{end}" for end in (".tar.gz", "-py3-none-any.whl")]
        for archive in archives:
            wrong = check(archive, version)
            failures += len(wrong)
            print(f"{archive.name}: {'; '.join(wrong) or 'complete'}")
        smoke = room / "smoke.py"
        smoke.write_text(SMOKE)
        tried = given.python or list(found_pythons().values())
        for number, python in enumerate([] if given.check else tried):
            try:
                own = environment(room / f"venv{number}", python, given.pip, str(archives[1]))
                subprocess.run([own, str(smoke), version], check=True, cwd=room)
                print(f"{python}: works")
            except subprocess.CalledProcessError as error:
                failures += 1
                print(f"{python}: fails: {error}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
