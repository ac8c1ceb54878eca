# SPDX-License-Identifier: Apache-2.0
"""Lines and scopes of generated text."""

from torch_tile.codegen.lines import Lines
from torch_tile.diagnostics.errors import Span


def test_scopes_are_indented_and_lines_say_where_they_come_from():
    out = Lines()
    out.open("if (a)", Span("/some/where/kernel.py", 3, 3, 0, 1))
    out.open()
    out.line("b;", Span("kernel.py", 4, 5, 0, 1))
    out.close()
    out.otherwise("if (c)")
    out.line("d;")
    out.otherwise()
    out.close("} // end")
    assert out.depth == 0
    assert out.lines == [
        "if (a) {  // kernel.py:3",
        "  {",
        "    b;  // kernel.py:4",
        "  }",
        "} else if (c) {",
        "  d;",
        "} else {",
        "} // end",
    ]
