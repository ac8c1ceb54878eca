# SPDX-License-Identifier: Apache-2.0
"""A search for the fastest configuration, called by hand; `@autotune` makes one at the first call for new arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_tile.autotuner.candidate import Settings, settings_of, variant
from torch_tile.autotuner.result import AutotuneResult, Config
from torch_tile.autotuner.session import Session
from torch_tile.diagnostics.errors import error
from torch_tile.jit import JITFunction
from torch_tile.options import pass_options


class AutoTuner:
    """Finds the fastest of `configs` for a kernel function. TileLang's calls can be chained:
    `AutoTuner.from_kernel(kernel, configs).set_compile_args(...).set_profile_args(...).run()`.
    """

    def __init__(self, function: JITFunction, configs: Sequence[Config], settings: Settings | None = None):
        if not configs:
            why, fix = "is empty", "give at least one dict of keyword arguments"
            raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
        self.function, self.configs, self.settings = function, list(configs), settings or Settings()

    @classmethod
    def from_kernel(cls, kernel: Any, configs: Sequence[Config]) -> AutoTuner:
        """A tuner of a function that takes a configuration as keyword arguments, decorated with @jit or not."""
        return cls(kernel if isinstance(kernel, JITFunction) else JITFunction(kernel), configs)

    def set_compile_args(
        self, out_idx: int | Sequence[int] | None = None, target: object = "auto", **options: Any
    ) -> AutoTuner:
        """Options of `jit` for the kernel."""
        self.function = JITFunction(self.function.function, out_idx, target, pass_options("AutoTuner", **options))
        return self

    def set_profile_args(self, **settings: Any) -> AutoTuner:
        """Fields of Settings."""
        self.settings = settings_of("AutoTuner", settings, self.settings)
        return self

    def run(
        self, warmup: float | None = None, rep: float | None = None, timeout: float | None = None,
        args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, inputs: Sequence[Any] | None = None,
        **settings: Any,
    ) -> AutotuneResult:  # fmt: skip
        """The best configuration for the other arguments `args` and `kwargs` of the kernel function.

        `settings` are more fields of Settings, such as `early_stop`; TypeError for other names.

        `inputs` are tensors to time a lazy kernel on. Raises TileError if no configuration works.
        """
        given: dict[str, Any] = {"warmup": warmup, "rep": rep, "timeout": timeout}
        given |= settings
        self.settings = settings_of("AutoTuner.run", {k: v for k, v in given.items() if v is not None}, self.settings)
        result = Session(self.function, self.configs, self.settings, args, kwargs, inputs).result()
        if self.function.is_lazy:
            function, keywords = variant(self.function, result.config)
            kernel = function.compile(*args, **{**(kwargs or {}), **keywords})
            kernel.config, kernel.latency, kernel.ref_latency = result.config, result.latency, result.ref_latency
            result = replace(result, kernel=kernel)
        return result
