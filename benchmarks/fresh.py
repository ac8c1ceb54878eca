# SPDX-License-Identifier: Apache-2.0
"""Benchmarks whose times are those of a process that has just started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_fresh_process(module: str, *arguments: str, caches: str) -> Any:
    """What `python -m module arguments` prints last, read as JSON; all its caches are in the folder `caches`.

    Ends this process with the end of what it said if it fails.
    """
    places = {f"{of}_CACHE_DIR": f"{caches}/{of.lower()}" for of in ("TORCHINDUCTOR", "TORCH_TILE", "TRITON")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | places, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])
