# SPDX-License-Identifier: Apache-2.0
"""Scans of transformers' models by our operators, where the models look for mamba-ssm, causal-conv1d and fla.

A model file of transformers has these functions, and forwards of layers, in plain torch. One that agrees with ours in a
trial on small random tensors is replaced in its file. All models of the file use the replacement; arguments that ours
do not take go to the old one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_tile.inductor import compat
from torch_tile.inductor.settings import FAMILIES
from torch_tile.nn import linear_attention, scans
from torch_tile.ops.reference import reference

log: logging.Logger = logging.getLogger("torch_tile")
Call = Callable[..., Any]
PACKED = ("seq_idx", "cu_seqlens")
"""Arguments of packed sequences, which the functions in plain torch refuse."""


def convolution(old: Call, x: Any, weight: Any, bias: Any = None, activation: Any = None, **more: Any) -> Any:
    """Compute `causal_conv1d_fn` as model files call it, by our operator."""
    if activation not in scans.ACTIVATIONS or weight.shape[1] > 8 or is_packed(more):
        return old(x, weight, bias, activation=activation, **without_run(more))
    return scans.causal_conv1d_fn(x, weight, bias, activation=activation, **run_of(more))


def convolution_step(
    old: Call, x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None, **more: Any
) -> Any:
    """Compute `causal_conv1d_update` as model files call it, by our operator."""
    if activation not in scans.ACTIVATIONS or weight.shape[1] > 8 or x.shape[-1] != 1:
        return old(x, state, weight, bias, activation)
    return scans.causal_conv1d_update(x, state, weight, bias, activation, **run_of(more))


def scan(old: Call, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, *given: Any, **more: Any) -> Any:
    """Compute `mamba2_chunk_scan` as model files call it, by our operator."""
    names = ("D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states")
    more |= dict(zip(names, given, strict=False))
    if is_packed(more):
        return old(x, dt, A, B, C, chunk_size, **without_run(more))
    kept = {name: more[name] for name in (*names, "z") if name in more}
    return scans.mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **kept, **run_of(more))


def scan_step(old: Call, state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, *given: Any, **more: Any) -> Any:
    """Compute `mamba2_selective_state_update` as model files call it, by our operator."""
    names = ("D", "dt_bias", "dt_softplus", "z")
    more |= dict(zip(names, given, strict=False))
    kept = {name: more[name] for name in names if name in more}
    return scans.selective_state_update(state, x, dt, A, B, C, **kept, **run_of(more))


def chunk_rule(
    old: Call, q: Any, k: Any, v: Any, g: Any, beta: Any, chunk_size: int = 64, *given: Any, **more: Any
) -> Any:
    """Compute `torch_chunk_gated_delta_rule` as model files have it."""
    return linear_attention.chunk_gated_delta_rule(q, k, v, g, beta, **rule_options(given, more))


def rule_steps(old: Call, q: Any, k: Any, v: Any, g: Any, beta: Any, *given: Any, **more: Any) -> Any:
    """Compute `torch_recurrent_gated_delta_rule` as model files have it."""
    return linear_attention.fused_recurrent_gated_delta_rule(q, k, v, g, beta, **rule_options(given, more))


def rule_options(given: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a delta rule that model files have, by name; they ignore all others, and so do we."""
    names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    more = more | dict(zip(names, given, strict=False))
    return {name: more[name] for name in (*names, "cu_seqlens", "run") if name in more}


def lightning(
    old: Call,
    layer: Any,
    hidden_states: Any,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    run: Call = scans.operator,
    cache: Any = None,
    **more: Any,
) -> Any:
    """Compute the forward of MiniMax's `MiniMaxLightningAttention`, by our linear attention.

    transformers before 5.24 calls the cache `past_key_values`. What it ignores is ignored here, too.
    """
    batch, length, _ = hidden_states.shape
    heads, cache = layer.num_attention_heads, past_key_values if cache is None else cache
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    qkv = qkv.view(batch, length, heads, 3, layer.head_dim).unbind(3)
    decay = -layer.slope_rate.view(heads).float().expand(batch, length, heads)
    state = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    if state is None or length > 1:
        out, state = run("gated_linear_attention", *qkv, decay, state, None, 1.0)
    else:
        out, state = run("gated_linear_attention_step", state, *qkv, decay, 1.0)
    state = state.to(out.dtype)
    out = layer.norm(out.flatten(2))
    out = layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, state)
    return out, state


def is_packed(more: dict[str, Any]) -> bool:
    """Return whether the arguments pack several sequences into one."""
    return any(more.get(name) is not None for name in PACKED)


def run_of(more: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword argument `run`, the function by which a trial calls operators, if the arguments have it."""
    return {"run": more["run"]} if "run" in more else {}


def without_run(more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without the function that calls operators."""
    return {name: value for name, value in more.items() if name != "run"}


def try_convolution(function: Call) -> list[Any]:
    """Try a short convolution; return its results."""
    x, weight, bias = torch.randn(2, 5, 7), torch.randn(5, 4), torch.randn(5)
    return [function(x, weight, bias, activation="silu"), function(x[:, :, :2], weight, None, activation=None)]


def try_convolution_step(function: Call) -> list[Any]:
    """Try a step of a short convolution; return its results and its state."""
    x, state = torch.randn(2, 5, 1), torch.randn(2, 5, 4)
    return [function(x, state, torch.randn(5, 4), torch.randn(5), activation="silu"), state]


def try_scan(function: Call) -> list[Any]:
    """Try a scan of Mamba-2; return its results."""
    keys = torch.randn(2, 9, 2, 5), torch.randn(2, 9, 2, 5)
    options = {"dt_bias": torch.randn(4), "dt_softplus": True, "D": torch.randn(4), "return_final_states": True}
    state = torch.randn(2, 4, 3, 5)
    given = torch.randn(2, 9, 4, 3), torch.randn(2, 9, 4), -torch.rand(4), *keys
    return list(function(*given, chunk_size=4, initial_states=state, dt_limit=(0.1, 0.9), **options))


def try_scan_step(function: Call) -> list[Any]:
    """Try a step of a scan; return its results and its state."""
    state, skip, bias = torch.randn(2, 4, 3, 5), *(torch.randn(4)[:, None].expand(-1, 3) for _ in range(2))
    x, dt, A = torch.randn(2, 4, 3), torch.randn(2, 4, 1).expand(-1, -1, 3), -torch.rand(4)[:, None, None]
    keys = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    options = {"D": skip, "z": None, "dt_bias": bias, "dt_softplus": True}
    return [function(state, x, dt, A.expand(-1, 3, 5), *keys, **options), state]


def try_chunk_rule(function: Call, arguments: Call) -> list[Any]:
    """Try a delta rule on what `arguments` makes; return its results."""
    q, k, v, g, beta, state = arguments(70)
    whole = function(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return [*whole, function(q, k / 4, v, g=g, beta=beta)[0]]


def try_rule_steps(function: Call, arguments: Call) -> list[Any]:
    """Try some steps of a delta rule on what `arguments` makes; return their results."""
    q, k, v, g, beta, state = arguments(3)
    return list(function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True))


class Cache:
    """A cache of one layer, as MiniMax's."""

    state: Any = None

    def get_linear_cache(self, layer: int) -> Any:
        """Return the layer's state; None before the first tokens."""
        return self.state

    def set_linear_cache(self, layer: int, state: Any) -> None:
        """Keep the layer's state."""
        self.state = state


def try_lightning(function: Call) -> list[Any]:
    """Try a layer of lightning attention on some tokens and on one more; return its results."""
    heads, size, block, cache = 2, 3, 4, Cache()
    slope, times = torch.rand(heads, 1, 1), torch.arange(1, block + 1)[:, None]
    back = times - times.T
    given = {
        "layer_idx": 0, "num_attention_heads": heads, "head_dim": size, "block_size": block, "act_fn": torch.tanh,
        "qkv_proj": nn.Linear(5, 3 * heads * size), "output_gate": nn.Linear(5, heads * size), "norm": torch.tanh,
        "out_proj": nn.Linear(heads * size, 5), "slope_rate": slope, "query_decay": torch.exp(-slope * times),
        "key_decay": torch.exp(-slope * (block - times)),
        "diagonal_decay": torch.where(back >= 0, torch.exp(-slope * back), 0.0)[None],
    }  # fmt: skip
    layer, mask = SimpleNamespace(**given), torch.rand(2, 7) < 0.8
    some, one, named = torch.randn(2, 7, 5), torch.randn(2, 1, 5), inspect.signature(function).parameters
    name = "cache" if "cache" in named else "past_key_values"
    return [
        *function(layer, some, position_embeddings=None, attention_mask=mask, **{name: cache}),
        *function(layer, one, position_embeddings=None, attention_mask=None, **{name: cache}),
    ]


def repeated_arguments(length: int) -> list[Any]:
    """Make arguments as `rule_arguments` does, with a head of keys for each head of values."""
    q, k, *others = rule_arguments(length)
    return [*(t.repeat_interleave(2, 2) for t in (q, k)), *others]


def channel_arguments(length: int) -> list[Any]:
    """Make arguments as `repeated_arguments` does, with decays of channels."""
    q, k, v, _, beta, state = repeated_arguments(length)
    return [q, k, v, -torch.rand(2, length, 4, 5), beta, state]


def rule_arguments(length: int) -> list[Any]:
    """Make small random arguments of a delta rule: q, k, v, g, beta and a state."""
    keys, numbers = (torch.randn(2, length, 2, 5) for _ in range(2)), (torch.rand(2, length, 4) for _ in range(2))
    g, beta = numbers
    return [*keys, torch.randn(2, length, 4, 3), -g, beta, torch.randn(2, 4, 5, 3)]


def on_arguments(trial: Call, *arguments: Call) -> list[Call]:
    """Bind a trial to each maker of its arguments."""
    return [functools.partial(trial, arguments=each) for each in arguments]


ROLES: dict[str, tuple[Call, ...]] = {
    "causal_conv1d_fn": (convolution, try_convolution),
    "causal_conv1d_update": (convolution_step, try_convolution_step),
    "mamba2_chunk_scan": (scan, try_scan),
    "mamba2_selective_state_update": (scan_step, try_scan_step),
    "torch_chunk_gated_delta_rule": (chunk_rule, *on_arguments(try_chunk_rule, rule_arguments, repeated_arguments)),
    "torch_recurrent_gated_delta_rule": (rule_steps, *on_arguments(try_rule_steps, rule_arguments, repeated_arguments)),
    "chunk_kimi_delta_attention": (chunk_rule, *on_arguments(try_chunk_rule, channel_arguments)),
    "recurrent_kimi_delta_attention": (rule_steps, *on_arguments(try_rule_steps, channel_arguments)),
    "MiniMaxLightningAttention.forward": (lightning, try_lightning),
}
"""Functions of model files, and methods of their classes: ours, and trials that call one of them.

Older versions of transformers repeat the heads of keys before they call a delta rule, newer ones inside of it.
"""


def functions_of(file: Any) -> Iterable[tuple[str, Any, str, Any]]:
    """Return the functions of `ROLES` in a file: role, owner (the file or a class of it), name there, function."""
    for role in ROLES:
        *classes, name = role.split(".")
        owner = functools.reduce(lambda found, part: vars(found).get(part, object), classes, file)
        function = vars(owner).get(name)
        if function is not None:
            yield role, owner, name, function


def replace_scans(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Replace the scan functions in the files of a model's classes. Return the file and the name of each."""
    done = []
    for name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        file = sys.modules.get(name)
        if not name.startswith("transformers.models.") or file is None:
            continue
        for role, owner, attribute, old in functions_of(file):
            if hasattr(old, "_tile_old"):
                continue
            old = getattr(old, "_tile_captured", old)
            if agrees(old, *ROLES[role]):
                setattr(owner, attribute, replacement(old, ROLES[role][0]))
                done.append((name, role))
            else:
                log.info("%s.%s is not replaced: ours computes something else", name, role)
    return done


def capture_scans() -> None:
    """Let models of transformers whose files are imported call our scans where `backend="tile"` traces them.

    Each function of `ROLES` gets a wrapper. Outside of such a trace the wrapper calls the function itself.
    """
    for name, file in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or file is None:
            continue
        for role, owner, attribute, old in functions_of(file):
            if not hasattr(old, "_tile_old") and not hasattr(old, "_tile_captured"):
                setattr(owner, attribute, captured(old, *ROLES[role]))


def captured(old: Call, ours: Call, *trials: Call) -> Call:
    """Return a function that is ours in traces of our backend, if both agree, and the old one elsewhere."""

    @functools.cache
    def same() -> bool:
        return agrees(old, ours, *trials)

    @compat.constant_in_traces
    def is_ours() -> bool:
        """Return whether our backend traces the call, takes scans, and agrees with the model's own function."""
        backend, options = compat.backend_in_use()
        families = options.get("families", FAMILIES)
        return getattr(backend, "captures_scans", False) and "scan" in families and same()

    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() and is_ours():
            return ours(old, *args, **named)
        return old(*args, **named)

    functools.update_wrapper(call, old)
    call._tile_captured = old  # type: ignore[attr-defined]
    return call


def replacement(old: Call, ours: Call) -> Call:
    """Wrap an old function: our function runs instead, and calls the old one for arguments that it does not take."""

    def call(*args: Any, **named: Any) -> Any:
        return ours(old, *args, **named)

    functools.update_wrapper(call, old)
    call._tile_old = old  # type: ignore[attr-defined]
    return call


def agrees(old: Call, ours: Call, *trials: Call) -> bool:
    """Return whether both functions agree on small random tensors, ours in plain torch, for accepted arguments."""
    plain = getattr(old, "__wrapped__", old)
    for trial in trials:
        want = tried(trial, plain)
        if want is not None:
            found = tried(trial, functools.partial(ours, plain, run=reference))
            return found is not None and all(
                a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)
                for a, b in zip(want, found, strict=True)
            )
    return False


def tried(trial: Call, function: Call) -> list[Any] | None:
    """Return the results of a trial; None if it failed."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            results: list[Any] = trial(function)
        except Exception as problem:  # a trial of unknown code may fail in any way: then it is not what we know
            log.info("the trial of %s failed: %s", getattr(function, "__name__", function), problem)
            return None
    return results
