# SPDX-License-Identifier: Apache-2.0
"""Tile ops in generated code: one object for each different call, buffers of Inductor's plan, no copies or views."""

import functools
import os
import re
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_tile.inductor.backend import tile
from torch_tile.inductor.codegen.python_wrapper import CallText, processed
from torch_tile.inductor.compat import no_graph_caches

TILE = functools.partial(tile, options={"select": "tile"})


def compiled(f, *args, dynamic=None):
    """What the compiled `f` returns, the objects in its code, and the lines that use tensors."""
    torch._dynamo.reset()
    with torch.no_grad(), no_graph_caches():
        got, (code,) = run_and_get_code(torch.compile(f, backend=TILE, dynamic=dynamic), *args)
    sites = re.findall(r"^tile_\w+ = _torch_tile\.site\((.*)\)$", code, re.M)
    body = code[code.index("def call(") : code.index("def get_args")]
    lines = [line.strip() for line in body.splitlines() if re.search(r"tile_|buf\d+ = |fused|extern|return", line)]
    return got, sites, lines


def test_layers_share_objects_and_outputs_reuse_memory():
    def f(x, *weights):
        for w in weights:
            x = torch.relu(x @ w.t()) + x
        return x

    x, *weights = torch.randn(6, 8), *(torch.randn(8, 8) for _ in range(4))
    got, sites, lines = compiled(f, x, *weights)
    torch.testing.assert_close(got, f(x, *weights), rtol=1e-5, atol=1e-4)
    assert sites == [
        "'ttt', lambda x0, x1, y0: _torch_tile.gemm(x0, [_torch_tile.view(x1, (8, 8), (1, 8), 0)], [x0], 't', "
        "'v0=relu(acc0);v1=add(x0,v0);ret v1', torch.float32, out=y0)"
    ]
    calls = [line for line in lines if line.startswith("tile_")]
    assert len(calls) == 4 and len({line.split("(")[0] for line in calls}) == 1
    assert sum("empty_strided" in line for line in lines) == 2  # the others take over what is no longer needed
    assert not any("fused" in line for line in lines)


def test_two_outputs():
    def f(x, r, w):
        y, total = torch.ops.tile.add_rms_norm(x, r, w, 1e-5)
        return y.sin() + total, total.cos()

    x, r, w = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    for dynamic in (False, True):
        got, (site,), lines = compiled(f, x, r, w, dynamic=dynamic)
        torch.testing.assert_close(got, f(x, r, w))
        assert "add_rms_norm(x0, x1, x2, 1e-05, out=(y0, y1))" in site
        (call,) = [n for n, line in enumerate(lines) if line.startswith("tile_")]
        names = re.findall(r"buf\d+", lines[call])
        assert len(names) == 2 and all(any(line.startswith(f"{n} = empty") for line in lines[:call]) for n in names)


def test_arguments_by_name():
    ops = torch.ops.tile

    def f(x, w, r, q, k):
        return (
            ops.rms_norm(x, w, eps=1e-5, activation="silu"), ops.add_rms_norm(x, r, weight=w, weight_offset=1.0),
            ops.layer_norm(x, bias=w, eps=1e-3), ops.softmax(x, dtype=torch.float64, dim=0),
            ops.attention(q, k, k, causal=True, scale=0.3, q_offset=2), ops.attention_lse(q, k, k, window=3),
            ops.linear(x, w[None], activation="gelu"), ops.swiglu(x, w[None], up_weight=w[None]),
            ops.mla_decode(q, q, k[:, 0], k[:, 0], num_splits=1, scale=0.1),
            ops.gemm(x, [x.mT], [], kinds="", epilogue="", dtype=torch.float32),
        )  # fmt: skip

    args = *(torch.randn(n) for n in ((5, 16), (16,), (5, 16))), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8)
    got, sites, _ = compiled(f, *args)
    torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-5)
    assert len(sites) == 10


def test_one_of_two_outputs():
    x, r = torch.randn(4, 16), torch.randn(4, 16)
    for n in (0, 1):
        f = lambda x, r, n=n: torch.ops.tile.add_rms_norm(x, r)[n] * 2  # noqa: E731
        torch.testing.assert_close(compiled(f, x, r)[0], f(x, r))


def test_no_input_is_copied():
    """Whatever its strides: a permuted product, a slice, an expanded mask."""

    def f(x, w, mask):
        h = (x + 1).permute(0, 2, 1, 3)
        q, k, v = h[..., :8], h[..., 8:16], h[..., 16:]
        return torch.ops.tile.attention(q, k, v, mask.expand(2, 4, 5, 5))

    args = torch.randn(2, 5, 4, 24), torch.randn(3), torch.randn(5, 5)
    got, (site,), lines = compiled(f, *args)
    torch.testing.assert_close(got, f(*args))
    assert site.count("_torch_tile.view(x0, (2, 4, 5, 8), (480, 24, 96, 1), ") == 3
    assert "_torch_tile.view(x1, (2, 4, 5, 5), (0, 0, 5, 1), 0)" in site
    assert sum("fused" in line for line in lines) == 1  # the addition


def test_sizes_known_at_run_time():
    def f(x, w, m):
        y = (x.transpose(0, 1) @ w.t()).relu()
        return torch.ops.tile.attention(y[None], y[None], y[None], None, True, 0.5, 0, m)

    w = torch.randn(8, 8)
    frames = []
    torch._dynamo.reset()
    run = torch.compile(f, backend=TILE, dynamic=True)
    with torch.no_grad():
        for a, b, m in ((3, 5, 1), (4, 7, 2), (6, 2, 5)):
            x = torch.randn(a, b, 8)
            torch.testing.assert_close(run(x, w, m), f(x, w, m), rtol=1e-5, atol=1e-5)
            frames.append(counters["stats"]["unique_graphs"])
    assert len(set(frames)) == 1
    _, sites, lines = compiled(f, torch.randn(3, 5, 8), w, 1, dynamic=True)
    assert any(re.match(r"'ttq+', lambda x0, y0, n0", site) for site in sites)
    assert any(re.match(r"tile_attention_\d\(buf\d, buf\d, .*s\d+", line) for line in lines)


def test_numbers():
    class Wrapper:
        val_to_arg_str = staticmethod(str)

    import sympy

    text, s = CallText(Wrapper()), sympy.Symbol("s", integer=True)
    assert repr([text.number(each) for each in (3, sympy.Integer(4), 2 * s, s, 2 * s)]) == "[3, 4, n0, n1, n0]"
    assert repr(text.number(sympy.Symbol("f", real=True, integer=False))) == "n2"
    constants = (float("inf"), -float("inf"), float("nan"), 0.5, None, "a'b", torch.bfloat16, True)
    shown = repr([text.constant(c) for c in constants])
    assert shown == "[float('inf'), float('-inf'), float('nan'), 0.5, None, \"a'b\", torch.bfloat16, True]"
    site = text.site("op", ["x", 1], {"k": 2}, ["y"])
    assert site == "_torch_tile.site('qqd', lambda n0, n1, n2: _torch_tile.op('x', 1, k=2, out='y'))"
    assert text.given() == ["2*s", "s", "f"]


SCRIPT = """
import functools, torch
from torch._dynamo.utils import counters
from torch_tile.inductor.backend import tile
f = lambda x, w: torch.nn.functional.rms_norm(torch.relu(x @ w) + x, (8,))
x, w = torch.arange(48.0).view(6, 8) / 48, torch.eye(8)
with torch.no_grad():
    got = torch.compile(f, backend=functools.partial(tile, options={"select": "tile"}))(x, w)
    torch.testing.assert_close(got, f(x, w))
print("hits", counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_new_process_makes_the_objects_from_the_cached_code(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for hits in (0, 1):
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert f"hits {hits}" in result.stdout


def test_wrappers_that_are_not_in_python_make_the_launches_themselves():
    pytest.importorskip("torch._inductor.codegen.cpp_wrapper_cpu")

    def f(x, r):
        y, total = torch.ops.tile.add_rms_norm(x.t(), r)
        return torch.ops.tile.softmax(y[1:]) + 1, total

    for dynamic in (False, True):
        x, r = torch.randn(8, 4), torch.randn(4, 8)
        torch._dynamo.reset()
        if dynamic:  # how many rows, not how long they are
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(r, 0)
        with torch.no_grad(), no_graph_caches(), torch._inductor.config.patch(cpp_wrapper=True):
            got, codes = run_and_get_code(torch.compile(f, backend=TILE), x, r)
        torch.testing.assert_close(got, f(x, r))
        assert not any("_torch_tile.site" in code or "torch.ops.tile" in code for code in codes)
        assert any(re.search(r"tile_add_rms_norm_\d\(tile::addresses\(buf", code) for code in codes)  # x.t() is copied


def test_either_form_of_processed_arguments_is_read():
    """torch 2.15 gives an object with names where earlier versions give a tuple of five."""
    fields = ("example_output", "tensor_args", "non_tensor_args", "unflatten_args", "unbacked_bindings")
    values = ("out", ["x"], [1], len, None)
    named = types.SimpleNamespace(**dict(zip(fields, values, strict=True)))
    assert processed(values) == processed(named) == values[:4]
