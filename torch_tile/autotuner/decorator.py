# SPDX-License-Identifier: Apache-2.0
"""`@autotune(configs=...)` above `@jit`: calls leave out the tunable arguments, and get the fastest configuration."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Unpack

from torch_tile.autotuner.machine import can_measure
from torch_tile.autotuner.result import AutotuneResult, Config, SearchSettings, Settings, settings_of, variant
from torch_tile.autotuner.session import AutoTuner
from torch_tile.autotuner.trials import made_by_seed
from torch_tile.diagnostics.arguments import explains_misfits
from torch_tile.diagnostics.errors import error
from torch_tile.diagnostics.spelling import instead_of, missing_attribute, nearest
from torch_tile.hardware import Target
from torch_tile.jit import JITFunction
from torch_tile.kernel import JITKernel
from torch_tile.profiler import made_up

Configs = Sequence[Config] | Callable[..., Sequence[Config]]
MOST_FORMS = 1024  # forms of arguments that are remembered

_inputs: ContextVar[Sequence[Any] | None] = ContextVar("autotune_inputs", default=None)


@contextlib.contextmanager
def set_autotune_inputs(*tensors: Any) -> Iterator[None]:
    """Time kernels tuned inside the `with` on these arguments (or on one list of them), not on made-up ones."""
    given = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    token = _inputs.set(given)
    try:
        yield
    finally:
        _inputs.reset(token)


def get_autotune_inputs() -> Sequence[Any] | None:
    """Return the arguments of the enclosing `set_autotune_inputs`, or None."""
    return _inputs.get()


@explains_misfits
def autotune(
    function: Any = None,
    *,
    configs: Configs | None = None,
    do_not_specialize: Sequence[str | int] = (),
    **settings: Unpack[SearchSettings],
) -> Any:
    """Decorate a `@jit` function: at the first call for new arguments, find the fastest of `configs` on this machine.

    `configs` are dicts of keyword arguments of the kernel function; `pass_configs` may be one. Or they are a function
    that makes the dicts from the arguments of the call. Arguments in `do_not_specialize`, by name or position, start no
    new search.

    `settings`, with their defaults:

    - `warmup=25` and `rep=100`: ms for each configuration that runs to its end.
    - `timeout=100`: seconds to compile one configuration.
    - `early_stop=True`: after half of the time, drop those slower than `early_stop_factor=1.3` times the best.
    - `prune=3.0`: do not try those whose estimate by the cost model is so many times the best's (None: try all).
    - `ref_prog`: a function of the same arguments. Its results are compared with the kernel's (`rtol`, `atol`,
      `max_mismatched_ratio`, `manual_check_prog`, `skip_check`).
    - `supply_type` or `supply_prog`: make the inputs of lazy kernels. Eager kernels are timed on the call's tensors,
      with copies of those that they write.
    """
    if configs is None:
        if meant := next((name for name in settings if nearest(name, ["configs"])), ""):
            raise error("bad_argument", None, op="autotune", name=meant, why="is not a setting", fix="write configs=")
        lists = {name: value for name, value in settings.items() if isinstance(value, list | tuple)}
        one = ", ".join(f"{name!r}: {value[0]!r}" for name, value in lists.items() if value) or "'block': 64"
        fix = f"give a list with a dict for each configuration, configs=[{{{one}}}, ...]"
        raise error("bad_argument", None, op="autotune", name="configs", why="is missing", fix=fix)
    if not callable(configs):
        configs = _dicts(configs)
    made = settings_of("autotune", settings)

    def decorate(decorated: Any) -> AutotunedFunction:
        if not isinstance(decorated, JITFunction):
            fix = "put @torch_tile.autotune(...) above @torch_tile.jit"
            why = f"is {type(decorated).__name__}, not a function decorated with @jit"
            raise error("bad_argument", None, op="autotune", name="function", why=why, fix=fix)
        return AutotunedFunction(decorated, configs, made, do_not_specialize)

    return decorate if function is None else decorate(function)


class AutotunedFunction:
    """A kernel function whose tunable arguments are found by measuring, for each form of the other arguments."""

    function: JITFunction
    configs: Configs
    settings: Settings
    __name__: Any

    def __init__(
        self, function: JITFunction, configs: Configs, settings: Settings, do_not_specialize: Sequence[str | int] = ()
    ):
        if not callable(configs):
            configs = _dicts(configs)
        self.function, self.configs, self.settings = function, configs, settings
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.names: tuple[str, ...] = tuple(function.signature.parameters)
        self.ignored: frozenset[str] = frozenset(
            self.names[each] if isinstance(each, int) else each for each in do_not_specialize
        )
        self.found: dict[Any, tuple[JITFunction, Config, Any]] = {}
        self.lock: threading.RLock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fastest kernel for these arguments (lazy style), or run it on these tensors (eager style).

        Tunable arguments that are given stay as they are. `__return_kernel=True` gives the kernel in both styles.
        """
        if kwargs.pop("__return_kernel", False):
            return self.compile(*args, **kwargs)
        key = self._key(args, kwargs)
        found = self.found.get(key)
        if found is None:
            with self.lock:
                found = self.found.get(key) or self._find(key, args, kwargs)
        function, config, kernel = found
        return kernel if kernel is not None else function(*args, **kwargs, **config)

    def __getattr__(self, name: str) -> Any:
        """Name the call that compiles the kernel, for an attribute that compiled kernels have."""
        call = f"{self.__dict__.get('__name__', 'f')}.compile(...)"
        raise missing_attribute(self, name, JITKernel, call)

    def compile(self, *args: Any, **kwargs: Any) -> JITKernel:
        """Compile the fastest kernel for these arguments; of an eager kernel, for sizes given by name.

        Tensors that are left out are made up for the search, unless `set_autotune_inputs` gives them. The kernel tells
        the configuration and its time: `config`, `latency`.
        """
        if self.function.is_lazy:
            return self(*args, **kwargs)  # type: ignore[no-any-return]
        key = "compile", self._key(args, kwargs)
        with self.lock:
            if key not in self.found:
                result = self.tune_sizes(args, kwargs)
                function, config = variant(self.function, result.config)
                kernel = function.compile(*args, **kwargs, **config)
                kernel.config, kernel.latency, kernel.ref_latency = result.config, result.latency, result.ref_latency
                self.found[key] = function, config, kernel
            return self.found[key][2]  # type: ignore[no-any-return]

    def tune_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AutotuneResult:
        """Search for an eager kernel on tensors made for its sizes, or on those of `set_autotune_inputs`."""
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        configs = self._configs(named)
        call = {name: value for name, value in named.items() if name in self.names}
        target = Target.of(self.function.target_for([]))
        device = target.kind if can_measure(target) else "meta"  # where nothing is measured, shapes are enough
        function, config = variant(self.function, {k: v for k, v in configs[0].items() if k not in named})
        wanted = [p for p in function.get_tir(**named, **config).program.params if p.name not in call]
        given = _inputs.get()
        if given is not None and len(given) == len(wanted):
            call |= {param.name: value for param, value in zip(wanted, given, strict=True)}
            wanted = []
        for param in wanted:
            with made_by_seed():
                call[param.name] = made_up(param, self.settings.supply_type, device)
        constants = {name: value for name, value in named.items() if name not in self.names}
        return self._search(configs, (), call, constants)

    def _configs(self, named: Mapping[str, Any]) -> Sequence[Config]:
        """Return the configurations for a call. A function that makes them gets the arguments that it names."""
        if not callable(self.configs):
            return self.configs
        wanted = inspect.signature(self.configs).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
        return _result_of(self.configs(**{name: value for name, value in named.items() if free or name in wanted}))

    @property
    def _tuner_cache(self) -> dict[Any, Any]:
        """Return the results so far, under TileLang's name; `clear()` forgets them."""
        return self.found

    def tune(self, *args: Any, **kwargs: Any) -> AutotuneResult:
        """Return the search's result for these arguments, with a table of all tried configurations."""
        configs = _result_of(self.configs(*args, **kwargs)) if callable(self.configs) else self.configs
        return self._search(configs, args, kwargs)

    def _search(
        self,
        configs: Sequence[Config],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        constants: Mapping[str, Any] | None = None,
    ) -> AutotuneResult:
        """Search among `configs`. `constants` are T.const sizes given by name."""
        given = {*self.names[: len(args)], *kwargs}
        configs = _dicts(configs)
        self._check_names(configs)
        self._check_call(args, kwargs, configs)
        left = [{name: value for name, value in config.items() if name not in given} for config in configs]
        unique = [config for number, config in enumerate(left) if config not in left[:number]]
        named = {**kwargs, **(constants or {})}
        return AutoTuner(self.function, unique, self.settings).run(args=args, kwargs=named, inputs=_inputs.get())

    def _check_names(self, configs: Sequence[Config]) -> None:
        """Raise TileError for a configuration with a name that is no argument of the kernel function."""
        for name in dict.fromkeys(name for config in configs for name in config):
            if name not in self.names and name != "pass_configs":
                near = nearest(name, self.names)
                why = f"have `{name}`, which is no argument of {self.__name__}"
                fix = f"its arguments are {', '.join(self.names)}: give it one more, `{name}`, or leave that out"
                fix = f"did you mean `{near}`?" if near else fix
                raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)

    def _check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], configs: Sequence[Config]) -> None:
        """Raise TypeError for a call that no configuration can complete: the fault is the caller's."""
        signature = self.function.signature
        try:
            named = signature.bind_partial(*args, **kwargs).arguments
            for name in dict.fromkeys(name for config in configs for name in config):
                if hasattr(named.get(name), "data_ptr"):
                    why, fix = f"have `{name}`, which is a tensor of this call", "name sizes and other Python values"
                    raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
            left = {name for config in configs for name in config if name in self.names and name not in named}
            signature.bind(*args, **kwargs, **dict.fromkeys(left))
        except TypeError as problem:
            unknown = next((name for name in kwargs if name not in self.names), "")
            meant = instead_of(unknown, self.names) if unknown else ""
            raise TypeError(f"{self.__name__}() {problem}{meant}; its parameters are {', '.join(self.names)}") from None

    def _find(self, key: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[JITFunction, Config, Any]:
        """Tune a kernel function for a new form of arguments, and keep the result."""
        if len(self.found) >= MOST_FORMS:
            self.found.clear()
        result = self.tune(*args, **kwargs)
        function, config = variant(self.function, result.config)
        self.found[key] = function, config, result.kernel
        return self.found[key]

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the form of a call."""
        named = [*zip(self.names, args, strict=False), *sorted(kwargs.items())]
        return tuple((name, _form(value)) for name, value in named if name not in self.ignored)


def _result_of(configs: Sequence[Config] | None) -> Sequence[Config]:
    """Return what a function of configurations made. Raise TileError for nothing."""
    if configs is None:
        fix = "return a list with a dict for each configuration: is a `return` missing?"
        raise error("bad_argument", None, op="autotune", name="configs", why="are a function that gives None", fix=fix)
    return configs


def _dicts(configs: Iterable[Any]) -> list[Any]:
    """Return configurations in a list: a generator gives them once.

    Raise TileError for a configuration that is no dict, and for one dict that should be a list of these.
    """
    if isinstance(configs, Mapping):
        example = "{" + ", ".join(f"{name!r}: {_first_of(value)!r}" for name, value in configs.items()) + "}"
        why, fix = "is one dict", f"give a list with a dict for each configuration, [{example[:100]}, ...]"
        raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
    if isinstance(configs, str) or not isinstance(configs, Iterable):
        why, fix = f"is {configs!r}"[:80], 'give a list with a dict for each configuration, [{"block_M": 64}, ...]'
        raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
    configs = list(configs)
    for config in configs:
        if not isinstance(config, Mapping):
            why, fix = f"have {config!r}"[:80], 'write each as a dict, {"block_M": 64, "num_stages": 2}'
            raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config[name] for config in configs if name in config]
        texts = [value for value in values if isinstance(value, str)]
        if texts and len(texts) < len(values):
            why, fix = f"have the text {texts[0]!r} for `{name}`, and numbers elsewhere", "write numbers without quotes"
            raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
    return configs


def _first_of(value: Any) -> Any:
    """Return the first of several values; any other value itself."""
    return value[0] if isinstance(value, list | tuple) and value else value


def _form(value: Any) -> Any:
    """Return the form of an argument: a tensor's dtype, sizes, strides and device; any other value itself."""
    if hasattr(value, "stride"):
        return value.dtype, value.shape, value.stride(), value.device
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
