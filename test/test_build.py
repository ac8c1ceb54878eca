# SPDX-License-Identifier: Apache-2.0
"""The schedule report that a compilation carries along."""

from torch_tile.build import Build, Note
from torch_tile.target import Target


def test_notes_keep_their_order():
    build = Build(Target("cuda", 90))
    build.note(None, "T.copy", "cp.async, 16 bytes")
    build.note(None, "T.copy", "scalar loads", "rows are not a multiple of 4 bytes")
    assert build.notes == [
        Note(None, "T.copy", "cp.async, 16 bytes"),
        Note(None, "T.copy", "scalar loads", "rows are not a multiple of 4 bytes"),
    ]
    assert Build(Target()).notes == []
