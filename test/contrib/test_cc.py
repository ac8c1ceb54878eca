# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

from torch_tile.contrib.cc import get_cplus_compiler
from torch_tile.runtime.host_compiler import find_compiler


def test_the_compiler_of_cpu_kernels():
    """Files start the program at the path."""
    path = get_cplus_compiler()
    assert path is not None and os.path.isabs(path)
    done = subprocess.run([path, "-dM", "-E", "-x", "c++", os.devnull], check=True, capture_output=True, text=True)
    assert "__cplusplus" in done.stdout


@pytest.mark.parametrize("words", ["{}", "{} -DX"])
def test_a_compiler_of_the_environment(monkeypatch, tmp_path, fresh_compiler, words):
    """CXX may hold options beside the path, and the path may be anywhere."""
    named = tmp_path / "compiler of mine"
    named.symlink_to(get_cplus_compiler())
    find_compiler.cache_clear()
    monkeypatch.setenv("CXX", words.format(f"'{named}'"))
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    assert get_cplus_compiler() == str(named)


def test_no_compiler(monkeypatch, fresh_compiler):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    assert get_cplus_compiler() is None
