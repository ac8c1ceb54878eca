# SPDX-License-Identifier: Apache-2.0
"""TVM's errors by name: each stands for every error that torch_tile raises for an author's kernel."""

from __future__ import annotations

from torch_tile.diagnostics.errors import TileError

TVMError = TileError
InternalError = TileError
OpError = TileError
DiagnosticError = TileError

__all__ = ["DiagnosticError", "InternalError", "OpError", "TVMError"]
