# SPDX-License-Identifier: Apache-2.0
"""The question for the host's C++ compiler, by TileLang's name."""

from __future__ import annotations

import shutil

from torch_tile.runtime.host_compiler import NoCompilerError, find_compiler


def get_cplus_compiler() -> str | None:
    """Return the path of the C++ compiler that builds CPU kernels; None where no compiler works.

    CXX may name a launcher in front of the compiler, as in "ccache g++": the path is then the launcher's.
    """
    try:
        program = find_compiler().command[0]
    except NoCompilerError:
        return None
    return shutil.which(program) or program


__all__ = ["get_cplus_compiler"]
