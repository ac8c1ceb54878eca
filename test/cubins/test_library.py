# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the library becomes machine code for every chip that we name, without spills or complaints.

`pytest test/cubins -k "sm_90a and gemm"` picks some.
"""

import pytest

from torch_tile.hardware import Target
from torch_tile.tools.library import catalogue, compiled

CASES = {case.name: case for case in catalogue()}
CHIPS = {Target("cuda", capability).arch: Target("cuda", capability) for capability in (80, 90, 120)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip, name):
    kernels = compiled(CASES[name], CHIPS[chip])
    if not kernels:
        pytest.skip("runs as plain torch there")
    for kernel in kernels:
        assert kernel.cubin.data[:4] == b"\x7fELF" and kernel.target == CHIPS[chip]
        assert set(kernel.resources) == {entry.name for entry in kernel.launcher.source.entries}
        spilled = {entry: found.spills for entry, found in kernel.resources.items() if found.spills}
        assert not spilled, f"{kernel.__name__}: {spilled}\n{kernel.schedule}"
        assert not kernel.cubin.warnings, kernel.cubin.warnings
        shared = max(entry.shared_bytes for entry in kernel.launcher.source.entries)
        assert shared <= CHIPS[chip].shared_limit
