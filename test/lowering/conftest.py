# SPDX-License-Identifier: Apache-2.0
"""Passes are tested on kernels written in the language: before, and what they must become."""

import pytest

from torch_tile.ir.node import alike


@pytest.fixture
def becomes():
    """`becomes(step, before, after)`: the pass turns one kernel into the other, which it then leaves as it is."""

    def compare(step, before, after, again=True):
        got, want = step(before.program), after.program
        text, wanted = (repr(p).split("def ")[1].partition("(")[2] for p in (got, want))
        assert text == wanted
        named = type(want)(got.name, want.params, want.kernels, want.workspaces, want.outputs)
        assert alike(got, named)
        if again:
            assert step(got) is got

    return compare


@pytest.fixture
def keeps():
    """`keeps(step, kernel)`: the pass has nothing to do and returns the very same program."""

    def check(step, kernel):
        assert step(kernel.program) is kernel.program

    return check
