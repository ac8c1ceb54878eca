# SPDX-License-Identifier: Apache-2.0
"""`TORCH_LOGS="tile"`: torch learns the name while it is being imported, before it reads the variable.

Found through the package's entry point in the group `torch.backends`, whose entries torch calls for that purpose (from
2.13 on; before, the variable is read first, and only `TORCH_LOGS="torch_tile"` works). A module of its own, because
every `import torch` runs it: it must import nothing, and must not fail.
"""

from __future__ import annotations

import contextlib


def register() -> None:
    """Make `tile` another name of the loggers below `torch_tile`."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # then the name does not exist, and that is all
        from torch._logging._internal import register_log

        register_log("tile", "torch_tile")
