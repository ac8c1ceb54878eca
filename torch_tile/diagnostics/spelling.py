# SPDX-License-Identifier: Apache-2.0
"""Guess the name that a misspelt one stands for."""

from __future__ import annotations

from collections.abc import Iterable

# Names that other libraries have, and ours for the same, which are not spelt alike.
_ALIASES = {
    "axis": ("dim",),
    "weight": ("elementwise_affine",),
    "swish": ("silu",),
    "embed_dim": ("hidden_size",),
    "d_model": ("hidden_size",),
    "labels": ("target",),
    "top_k": ("k", "top"),
    "topk": ("k", "top"),
    "moe": ("QuantizedExperts", "grouped_gemm"),
    "cache_seqlens": ("seq_lens", "lengths"),
    "context_lens": ("seq_lens", "lengths"),
    "page_table": ("block_table", "block_tables"),
    "fp64": ("float64",),
    "double": ("float64",),
    "fp32": ("float32",),
    "float": ("float32",),
    "single": ("float32",),
    "fp16": ("float16",),
    "half": ("float16",),
    "bf16": ("bfloat16",),
    "int": ("int32",),
    "long": ("int64",),
    "byte": ("uint8",),
    "boolean": ("bool",),
    "fp8": ("float8_e4m3fn",),
    "e4m3": ("float8_e4m3fn",),
    "e5m2": ("float8_e5m2",),
}

# Names and keywords of other libraries that nothing here has, and what to write instead.
_ABSENT = {
    "select": 'write options={"select": "tile"}',
    "families": 'write options={"families": ["norm"]}',
    "head_first": "time comes before heads, [B, T, H, D]: give x.transpose(1, 2)",
    "groups": "all channels are one group: call torch's convolution for others",
    "enable_gqa": "leave it out: fewer heads of k and v are shared by those of q",
    "dropout_p": "leave it out: apply F.dropout to the result, or compute this layer by torch",
    "dropout": "leave it out: add an nn.Dropout, or keep torch's layer",
    "mutates_args": "torch.library.custom_op has it: this function takes a compiled kernel",
    "slot_mapping": "leave it out: slots follow from block_table and seq_lens",
    "Config": "write each configuration as a dict: configs=[{'block_M': 64}]",
    "heuristics": "compute it from the sizes in the kernel function: Python's values are constants",
    "set_cache_dir": "set the environment variable TORCH_TILE_CACHE_DIR before the import",
    "clear_cache": "remove the folder of TORCH_TILE_CACHE_DIR, else ~/.cache/torch_tile",
    "is_available": "kernels run on any CPU; torch.cuda.is_available() tells of GPUs",
    "reduction": "leave it out: each row has its loss, so take .mean() of the result",
    "inplace": "leave it out: results are new tensors",
    "out": "leave it out: results are new tensors",
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name of `known` that is spelt most like `name`, in either case of letters; "" if none is.

    A part of a name between underlines counts as near, `stages` for `num_stages`, and so does its beginning. A longer
    name with a known part does, too, `softmax_scale` for `scale`.
    """
    from difflib import get_close_matches  # not before: `import torch_tile` needs none of it

    spellings = {k.lower(): k for k in known}
    low = name.lower()
    if meant := [spellings[k] for k in _ALIASES.get(low, ()) if k in spellings]:
        return meant[0]
    parts = low.split("_")
    found = sorted((k for k in spellings if low in k.split("_") or (len(low) > 2 and k.startswith(low))), key=len)
    found = found or get_close_matches(low, spellings, 1, 0.9)  # one letter too many
    found = found or [k for k in spellings if len(k) > 2 and k in parts] or get_close_matches(low, spellings, 1, cutoff)
    return spellings[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean ...?" with the name of `known` nearest to `name`, or ""."""
    near = nearest(name, known, cutoff)
    return f"; did you mean {near}?" if near else ""


def instead_of(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; " and what to write for an unknown keyword or name: advice, else the nearest of `known`, or ""."""
    return f"; {_ABSENT[name]}" if name in _ABSENT else did_you_mean(name, known, cutoff)


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Build the error for a name that a module does not have."""
    known = list(known)
    meant = instead_of(name, known, 0.8) or _of_torch(name) or did_you_mean(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{meant}")


def _of_torch(name: str) -> str:
    """Return "; " and where torch has a layer or function by this name, or ""."""
    from importlib import import_module  # not before: `import torch_tile` needs none of it

    homes = ("torch.nn", "torch.nn.functional", "torch")
    home = next((each for each in homes if not name.startswith("_") and hasattr(import_module(each), name)), "")
    return f"; torch's own is {home}.{name}" if home else ""


def missing_attribute(owner: object, name: str, compiled: type | None = None, call: str = "") -> AttributeError:
    """Build the error for an attribute that an object does not have; `call` gives a kernel of the class `compiled`."""
    why = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(why)
    own = _attributes(type(owner))
    theirs = [each for each in _attributes(compiled) if each not in own] if compiled else []
    near = name if name in theirs else nearest(name, (*own, *theirs))
    if near in theirs:
        return AttributeError(f"{why}: compiled kernels have it, as {call}.{near}")
    return AttributeError(f"{why}; did you mean {near}?" if near else why)


def _attributes(kind: type) -> list[str]:
    """Return the public attributes of a class, those that are only annotated included."""
    return [each for each in (*dir(kind), *getattr(kind, "__annotations__", {})) if not each.startswith("_")]
