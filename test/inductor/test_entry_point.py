# SPDX-License-Identifier: Apache-2.0
"""The backend's name where the package is on PYTHONPATH only; installed metadata is hidden from these processes."""

import subprocess
import sys

import pytest

HIDDEN = """
import sys
from importlib import metadata
search = metadata.MetadataPathFinder._search_paths
def without(name, paths):
    return (d for d in search(name, paths) if not d.name.startswith("torch_tile-"))
metadata.MetadataPathFinder._search_paths = staticmethod(without)
"""
BEFORE = "import torch, torch_tile; assert 'torch._dynamo' not in sys.modules;"
AFTER = "import torch, torch._dynamo; torch._dynamo.list_backends(); import torch_tile;"
USE = """
from torch._dynamo.backends.registry import list_backends, lookup_backend
assert "tile" in list_backends()
assert lookup_backend("tile") is torch_tile.tile
print("right")
"""


@pytest.mark.parametrize("first", [BEFORE, AFTER], ids=["before dynamo", "after it looked"])
@pytest.mark.parametrize("hidden", [HIDDEN, "import sys\n"], ids=["on the path", "as it is"])
def test_backend_is_found(hidden, first):
    run = [sys.executable, "-c", hidden + first + USE]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-3000:]


def test_nobody_takes_it_for_installed():
    code = HIDDEN + (
        "import torch_tile\ntry: metadata.version('torch_tile')\nexcept metadata.PackageNotFoundError: print('right')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-3000:]
