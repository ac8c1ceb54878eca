# SPDX-License-Identifier: Apache-2.0
"""TVM's `transform.PassContext`: options for what is compiled inside a `with`. Passes have no counterparts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch_tile.compat.absent import absent
from torch_tile.diagnostics.errors import error
from torch_tile.options import options_around


class PassContext:
    """`with PassContext(config={"tl.enable_fast_math": True}):` holds for kernels that are compiled inside.

    `opt_level`, `required_pass` and `disabled_pass` have no effect. Raises TileError for unknown keys of `config`, and
    for instruments, which watch TVM's passes.
    """

    _entered: list[PassContext] = []

    def __init__(
        self,
        opt_level: int = 2,
        required_pass: Sequence[str] = (),
        disabled_pass: Sequence[str] = (),
        instruments: Sequence[Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        if instruments:
            why, fix = "watch TVM's passes", "python -m torch_tile show FILE prints what each pass made"
            raise error("bad_argument", None, op="PassContext", name="instruments", why=why, fix=fix)
        self.opt_level, self.config = opt_level, dict(config or {})
        self._stack = ExitStack()

    def __enter__(self) -> PassContext:
        around = self._entered[-1].config if self._entered else {}
        self._stack.enter_context(options_around({**around, **self.config}))
        self._entered.append(self)
        return self

    def __exit__(self, *problem: object) -> None:
        self._entered.remove(self)
        self._stack.close()

    @classmethod
    def current(cls) -> PassContext:
        """Return the innermost context; one without options where there is none."""
        return cls._entered[-1] if cls._entered else cls()


def __getattr__(name: str) -> Any:
    """Return what stands for a pass of TVM's: its use is an error."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absent(f"tvm.transform.{name}")


__all__ = ["PassContext"]
