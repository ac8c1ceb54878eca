# SPDX-License-Identifier: Apache-2.0
"""Options of `jit` and `compile` by TileLang's names, so that kernels written for it run unchanged.

Those that change nothing here are accepted; a name that nobody knows is an error. Keys of pass_configs are free.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import error

# TileLang's options that change nothing here: there is one way to build for each target, and it is quick.
ACCEPTED = ("target_host", "execution_backend", "verbose", "debug_root_path")
KNOWN = ("out_idx", "target", "pass_configs", "compile_flags", "strict", *ACCEPTED)
FAST_MATH_FLAGS = ("--use_fast_math", "-use_fast_math")


class _Keys(type):
    """Any name is a key: an unknown option of another version is accepted, as TileLang asks."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower().replace("tl_", "tl.", 1).replace("tir_", "tir.", 1)


class PassConfigKey(metaclass=_Keys):
    """`PassConfigKey.TL_ENABLE_FAST_MATH` and the like, for `jit(pass_configs={...})`.

    Those that matter here: TL_ENABLE_FAST_MATH, TL_ENABLE_TF32 (products of float32 on tensor cores), TL_STRICT.
    """


def pass_options(
    op: str, base: PassOptions | None = None, /, strict: bool = False, pass_configs: Mapping[str, Any] | None = None,
    compile_flags: str | list[str] | tuple[str, ...] | None = None, **others: Any,
) -> PassOptions:  # fmt: skip
    """The compiler's switches from the keyword arguments of `op`; TileError for one that is none of TileLang's.

    Switches of `base` stand unless an argument says otherwise.
    """
    base = base or PassOptions()
    for name in others:
        if name not in ACCEPTED:
            near = difflib.get_close_matches(name, KNOWN, 1)
            fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(KNOWN)}"
            raise error("bad_argument", None, op=op, name=name, why="is not an option", fix=fix)
    configs = {str(key).lower(): value for key, value in (pass_configs or {}).items()}
    flags = compile_flags.split() if isinstance(compile_flags, str) else list(compile_flags or ())
    fast = configs.get("tl.enable_fast_math", not configs.get("tl.disable_fast_math", not base.fast_math))
    return PassOptions(
        strict=bool(strict or configs.get("tl.strict", base.strict)),
        fast_math=bool(fast or any(flag in FAST_MATH_FLAGS for flag in flags)),
        tf32=bool(configs.get("tl.enable_tf32", base.tf32)),
    )
