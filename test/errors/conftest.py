# SPDX-License-Identifier: Apache-2.0
"""How a kernel that must fail is checked: the code of its first finding, and the place that is marked in its source."""

import pytest

from torch_tile.diagnostics import TileError


@pytest.fixture
def refused():
    """`refused(case, code, text)` runs `case`, which must fail with `code` at `text` in the line marked `# here`.

    Returns the error. `text` None means that the error has no place.
    """

    def check(case, code, text):
        with pytest.raises(TileError) as caught:
            case()
        problem = caught.value
        assert problem.code == code, str(problem)
        if text is None:
            assert problem.span is None
            return problem
        span = problem.span
        assert span.file == case.__code__.co_filename
        assert span.source().endswith("# here"), span.source()
        assert span.source()[span.column :].startswith(text)
        if span.end_line == span.line:
            assert span.source()[span.column : span.end_column] == text
        assert f"error[{code}]" in str(problem) and f":{span.line}:{span.column + 1}" in str(problem)
        return problem

    return check
