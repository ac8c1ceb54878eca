# SPDX-License-Identifier: Apache-2.0
"""Packages that the decoder's library imports without need: hidden while it is imported, and back afterwards."""

import importlib.util
import sys

import pytest

from benchmarks.wan_vae import hidden


def test_hidden_packages_are_not_found_until_the_import_is_done(tmp_path, monkeypatch):
    broken = tmp_path / "a_broken_package.py"
    broken.write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OSError), hidden(broken.stem, "pytest"):
        assert importlib.util.find_spec(broken.stem) is None
        with pytest.raises(ImportError):
            importlib.import_module(broken.stem)
        assert sys.modules["pytest"] is pytest  # what is imported already stays
        raise OSError
    assert importlib.util.find_spec(broken.stem) is not None
    assert sys.modules["pytest"] is pytest
