# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile env`: what a bug report should say about the machine. It compiles nothing and takes seconds.

The home folder is printed as `~`, and no variable is printed that torch_tile and torch do not read.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch_tile
from torch_tile.tools import doctor

PACKAGES = (
    "numpy",
    "triton",
    "transformers",
    "diffusers",
    "peft",
    "bitsandbytes",
    "torchao",
    "tilelang",
    "nvidia-cuda-nvrtc",
)


def describe() -> str:
    """Return one line for each fact; a fact that cannot be found says why not."""
    lines = [f"{name:<14} {_result_or_reason(find)}" for name, find in FACTS]
    return "\n".join(lines).replace(str(Path.home()), "~")


def _result_or_reason(find: Callable[[], str]) -> str:
    """Return what `find` returns, or "none" with the reason if it raises."""
    try:
        return find()
    except Exception as problem:  # whatever is wrong with this machine belongs into the report
        return f"none ({str(problem) or type(problem).__name__})"


def own_version() -> str:
    """Return the version of torch_tile, the commit of a checkout, and the folder that it is imported from."""
    folder = Path(torch_tile.__file__).parent
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git: an installed package
        commit = ""
    return f"{torch_tile.__version__}{f' ({commit})' if commit else ''} at {folder}"


def machine() -> str:
    """Return the system, and the name of the processor where the system tells it."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    return f"{platform.platform()}, {name or platform.processor() or 'unknown processor'}, {os.cpu_count()} cores"


def compiler() -> str:
    """Return the first line of the C++ compiler's own version, after its command and flags."""
    from torch_tile.runtime.host_compiler import find_compiler

    command = find_compiler().command
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30).stdout.splitlines()
    return f"{doctor.check_compiler()}; {said[0] if said else 'says no version'}"


def nvrtc() -> str:
    """Return the version and the file of NVRTC."""
    from torch_tile.runtime.nvrtc import find_nvrtc, nvrtc_version

    return "{}.{}".format(*nvrtc_version()) + f" at {find_nvrtc().path}"


def torch_build() -> str:
    """Return the versions that torch was built with, and whether it uses CUDA."""
    import torch

    return f"{doctor.check_torch()}, CUDA {torch.version.cuda or 'none'}, debug {torch.version.debug}"


def packages() -> str:
    """Return the versions of other packages that change what happens."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none"


FACTS: list[tuple[str, Callable[[], str]]] = [
    ("torch_tile", own_version),
    ("Python", doctor.check_python),
    ("torch", torch_build),
    ("packages", packages),
    ("machine", machine),
    ("C++ compiler", compiler),
    ("OpenMP", doctor.check_openmp),
    ("NVRTC", nvrtc),
    ("CUDA driver", doctor.check_driver),
    ("GPU", doctor.check_gpu),
    ("cache", doctor.check_cache),
    ("variables", doctor.check_variables),
]
