# SPDX-License-Identifier: Apache-2.0
"""What must hold of every op alike: torch's own opcheck, layout of results, gradients, autocast, dynamic shapes."""

import random
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_tile
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops.registration import SCHEMAS
from torch_tile.ops.registry import OPERATORS

OPS = sorted(SCHEMAS)
PRODUCTS = [
    *("gemm", "grouped_gemm", "k_grouped_gemm", "dequant_gemm", "grouped_dequant_gemm", "linear", "swiglu"),
    *("attention", "attention_lse", "mla_decode", "mla_decode_fp8", "mla_decode_lse", "mla_sparse"),
    *("attention_block_sparse", "attention_block_sparse_lse"),
    *("attention_paged", "attention_paged_lse", "attention_varlen", "attention_varlen_lse"),
    *("conv", "causal_conv1d", "causal_conv1d_update", "ssd_chunk_scan", "selective_state_update"),
    *("gated_delta_rule", "gated_delta_rule_step", "gated_linear_attention", "gated_linear_attention_step"),
    *("rwkv7", "rwkv7_step"),
]
LIKE_QUERY = [name for name in PRODUCTS if name.startswith(("attention", "mla"))]  # in the memory order of the queries
LIKE_QUERY += ["attention_fp8"]
# Each gradient in the memory order of its tensor.
OF_ATTENTION = ["attention_backward", "attention_block_sparse_backward", "attention_varlen_backward"]
BACKWARDS = [*OF_ATTENTION, "causal_conv1d_backward", "cross_entropy_backward", "ssd_chunk_scan_backward"]
BACKWARDS += ["gated_delta_rule_backward", "gated_linear_attention_backward", "rwkv7_backward"]
ANY_DTYPE = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_gradients",
    "route",
]  # sums and results are in float32 whatever the logits' dtype
OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
REFUSING = [
    "scaled_gemm",
    "grouped_scaled_gemm",
    "k_grouped_scaled_gemm",
    "masked_scaled_gemm",
    "quantize_fp8",
    "quantize_int8",
    "silu_mul_quantize",
    "fused_norm_quantize",
    "mla_decode_fp8",
    "attention_fp8",
    "index_scores",
]  # gradients
INTEGERS = ["mla_schedule", "group_tokens", "lightning_index", "nsa_select"]  # arguments and results
WITH_DTYPE = ["gemm", "grouped_gemm", "k_grouped_gemm", "dequant_gemm", "grouped_dequant_gemm", "fused_norm"]


def overload(name):
    return getattr(torch.ops.tile, name).default


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, dtype, samples, seed):
    cases = list(enumerate(samples(name, 100, dtype, requires_grad=True)))
    most = 4 if dtype == torch.float32 else 2  # each takes seconds, of which most are spent on tracing it
    for i, args in random.Random(seed).sample(cases, min(most, len(cases))):
        print("sample", i)
        # torch's check of the schema multiplies by numbers, which float8 does not have.
        float8 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
        checks = [c for c in OPCHECKS if not (("scaled_gemm" in name or float8) and c == "test_schema")]
        torch.library.opcheck(overload(name), args, test_utils=checks)


@pytest.mark.parametrize("name", OPS)
def test_none_for_a_tensor_is_refused_by_its_name(name, samples):
    args = next(iter(samples(name, 0, torch.float32)))
    wanted = [(i, a.name) for i, a in enumerate(overload(name)._schema.arguments) if str(a.type) == "Tensor"]
    for i, argument in wanted:
        with_none = (*args[:i], None, *args[i + 1 :])
        for device in ("cpu", "meta"):  # the kernel, and the fake one
            given = tree_map_only(torch.Tensor, lambda t, device=device: t.to(device), with_none)
            with pytest.raises(TypeError, match=f"tile.{name}: {argument} is None; expected a tensor"):
                overload(name)(*given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", sorted(set(OPS) - {"quantize_fp8", "quantize_int8", "silu_mul_quantize", "fused_norm_quantize"})
)  # whose results have dtypes of their own
def test_agrees_with_float64_and_is_dense_and_fresh(name, dtype, samples, to_double):
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    for seed in range(3):
        for i, args in enumerate(samples(name, seed, dtype)):
            print("sample", i)
            inputs = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
            results = outputs(overload(name)(*args))
            for n, (got, want) in enumerate(zip(results, outputs(overload(name)(*to_double(args))), strict=True)):
                if (name in OF_ATTENTION and n < 3) or (n == 0 and name in LIKE_QUERY):
                    like = args[n + 1 if name in OF_ATTENTION else 0]
                    assert got.stride() == empty_beside(like, got.shape[-1]).stride()
                else:
                    assert got.is_contiguous()
                assert got.untyped_storage().data_ptr() not in inputs
                assert want.dtype == (torch.float64 if got.is_floating_point() else got.dtype)
                # Where results are sums that cancel, errors follow the largest of them.
                size = max(1.0, float(want.double().abs().nan_to_num(0, 0, 0).max())) if want.numel() else 1.0
                torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * size)


# Arguments of a backward are results of the forward, whose second gradients check it.
@pytest.mark.parametrize("name", sorted(set(OPS) - {*BACKWARDS, *REFUSING, *INTEGERS}))
def test_gradcheck(name, samples):
    for i, args in enumerate(samples(name, 7, torch.float64, requires_grad=True)):
        print("sample", i)
        if name in WITH_DTYPE:
            args = tuple(torch.float64 if isinstance(x, torch.dtype) else x for x in args)
        leaves, spec = torch.utils._pytree.tree_flatten(args)
        where = [j for j, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]

        def call(*tensors, leaves=leaves, spec=spec, where=where):
            full = list(leaves)
            for j, t in zip(where, tensors, strict=True):
                full[j] = t
            result = overload(name)(*torch.utils._pytree.tree_unflatten(full, spec))
            return tuple(r for r in outputs(result) if r.requires_grad)

        tensors = tuple(leaves[j].detach().clone().requires_grad_() for j in where)
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_autocast_follows_its_dtype(name, dtype, samples, to_double):
    for args in samples(name, 3, torch.float32):
        with torch.autocast("cpu", dtype=dtype):
            got = outputs(overload(name)(*args))[0]
        if name in WITH_DTYPE:
            assert got.dtype == next(x for x in args if isinstance(x, torch.dtype))
        elif name in ("conv", "linear") and len(args) > 3 and args[3] is not None:
            assert got.dtype == torch.float32  # as F.linear(..) + residual: the residual is not cast
        else:
            assert got.dtype == dtype
        # float64 is left alone.
        with torch.autocast("cpu", dtype=dtype):
            assert outputs(overload(name)(*to_double(args)))[0].dtype == torch.float64


@pytest.mark.parametrize("name", sorted(set(OPS) - {*PRODUCTS, *INTEGERS}))
def test_cpu_autocast_leaves_norms_alone_like_torch(name, samples):
    for args in samples(name, 3, torch.bfloat16):
        outside = outputs(overload(name)(*args))[0].dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert outputs(overload(name)(*args))[0].dtype == outside


@pytest.mark.every_sample
@pytest.mark.parametrize(
    "name", sorted(set(OPS) - {*BACKWARDS, *ANY_DTYPE, *REFUSING, *INTEGERS})
)  # autograd runs backwards, after autocast
def test_cuda_autocast_is_registered(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tile::{name}", "AutocastCUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tile::{name}", "AutocastCPU") == (name in PRODUCTS)


def test_autocast_inside_a_compiled_function_and_in_training(maker):
    t = maker(5, torch.float32, True)
    x, w = t(3, 7), t(9, 7)

    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.ops.tile.linear(x, w, None, None, "gelu")

    eager, compiled = f(x, w), torch.compile(f, backend="aot_eager")(x, w)
    assert eager.dtype == compiled.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, eager)
    compiled.float().sum().backward()
    assert x.grad.dtype == torch.float32 and w.grad.dtype == torch.float32


def count_frames(f, calls):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, dynamic=True, fullgraph=True)
    for args in calls:
        for got, want in zip(outputs(compiled(*args)), outputs(f(*args)), strict=True):
            torch.testing.assert_close(got, want)
    return counter.frame_count


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


BYTES = (8, False, 0, [], "", "")  # no aux, no epilogue
DYNAMIC = {
    "gemm": lambda t, n: (t(n, 7), [t(7, n + 2)], [t(n + 2)], "r", "v0=add(acc0,x0);ret v0", torch.float32),
    "grouped_gemm": lambda t, n: (
        *(t(n, 7), [t(3, 7, 9)], torch.tensor([2, 2, 11], dtype=torch.int32), [t(n, 1)], "c"),
        *("v0=mul(acc0,x0);ret v0", torch.float32),
    ),
    "k_grouped_gemm": lambda t, n: (
        *(t(n, 7), t(n, n + 2), torch.tensor([2, 2, 11], dtype=torch.int32), torch.float32),
    ),
    "dequant_gemm": lambda t, n: (t(n, 7), [torch.ones(n + 2, 7).char()], [t(n + 2, 1)], [], *BYTES, torch.float32),
    "linear": lambda t, n: (t(n, n + 1, 7), t(9, 7), t(9), t(n, n + 1, 9), "gelu"),
    "swiglu": lambda t, n: (t(n, n + 1, 7), t(9, 7), t(9, 7)),
    "attention": lambda t, n: (
        t(2, 4, n, 8),
        t(2, 2, n + 3, 8),
        t(2, 2, n + 3, 8),
        t(1, 1, n, n + 3),
        True,
        None,
        3,
        n,
        [t(4, 1, 1), t(n + 3)],
        "v=mul(x0,i2);w=mul(acc0,x1);y=add(v,w);ret y",
    ),
    "attention_varlen": lambda t, n: (
        t(n, 4, 8),
        t(n + 3, 2, 8),
        t(n + 3, 2, 8),
        starts(0, 2, 13),
        starts(0, 5, 13),
        12,
        11,
        True,
    ),
    "attention_varlen_backward": lambda t, n: (
        *(t(n, 4, 6), t(n, 4, 8), t(n + 3, 2, 8), t(n + 3, 2, 6), t(n, 4, 6), t(4, n)),
        *(starts(0, 2, 13), starts(0, 5, 13), 12, 11, True),
    ),
    "attention_block_sparse": lambda t, n: (
        *(t(2, 4, 40, 8), t(2, 2, n + 20, 8), t(2, 2, n + 20, 8)),
        *(starts(2, 0, 1).view(1, 1, 3), starts(1, 0, 0, 0, 2, 0).view(1, 1, 3, 2), None, None, 16, 16),
    ),
    "attention_block_sparse_backward": lambda t, n: (
        *(t(2, 4, 40, 6), t(2, 4, 40, 8), t(2, 2, n + 20, 8), t(2, 2, n + 20, 6), t(2, 4, 40, 6), t(2, 4, 40)),
        *(starts(2, 0, 1).view(1, 1, 3), starts(1, 0, 0, 0, 2, 0).view(1, 1, 3, 2), None, None, 16, 16),
    ),
    "attention_paged": lambda t, n: (
        t(n, 3, 4, 8),
        t(n + 4, 4, 2, 8),
        t(n + 4, 4, 2, 8),
        torch.arange(2 * n).view(n, 2).int() % n,
        starts(*[7] * n),
    ),
    "mla_decode": lambda t, n: (t(n, 2, 3, 8), t(n, 2, 3, 4), t(n, n + 4, 8), t(n, n + 4, 4)),
    "mla_decode_fp8": lambda t, n: (
        *(t(n, 2, 3, 128).detach(), t(n, 2, 3, 4).detach()),
        torch.randint(0, 60, (n, n + 4, 140), dtype=torch.uint8),
    ),
    "mla_sparse": lambda t, n: (
        *(t(n, 2, 3, 8), t(n, 2, 3, 4), t(n, n + 4, 8), t(n, n + 4, 4)),
        torch.arange(2 * n * 5, dtype=torch.int32).view(n, 2, 5) % 4,
    ),
    "index_scores": lambda t, n: (t(n, 2, 3, 8).detach(), t(n, n + 4, 8).detach(), t(n, 2, 3).detach()),
    "lightning_index": lambda t, n: (t(n, 2, 3, 8).detach(), t(n, n + 4, 8).detach(), t(n, 2, 3).detach(), 3),
    "nsa_select": lambda t, n: (
        *(t(2, 4, n, 8).detach(), t(2, 2, n + 3, 8).detach(), t(2, 4, n).detach(), 4 * n + 16, 3, 4, 4, 4),
    ),
    "mla_schedule": lambda t, n: (torch.arange(n, dtype=torch.int32), 3, 5),
    "rms_norm": lambda t, n: (t(n, n + 1, 7), t(7)),
    "add_rms_norm": lambda t, n: (t(n, n + 1, 7), t(n, n + 1, 7), t(7)),
    "layer_norm": lambda t, n: (t(n, n + 1, 7), t(7), t(7)),
    "fused_norm": lambda t, n: (
        *(t(n, n + 1, 7), [t(n, 1, 7), t(7)], "gr", "v0=add(acc0,x0);ret v0", "v0=mul(acc0,x1);ret v0"),
        *(True, 1, True, torch.float32),  # a float would be an input of the graph, and is not the question
    ),
    "softmax": lambda t, n: (t(n, n + 1, 7), 1),
}
DYNAMIC["scaled_gemm"] = lambda t, n: (
    *(torch.ones(n, 130).to(torch.float8_e4m3fn), torch.ones(n + 2, 130).to(torch.float8_e4m3fn).mT),
    *(torch.ones(n, 2), torch.ones(1, n + 2), [], "", "", torch.float32),
)
DYNAMIC["attention_fp8"] = lambda t, n: (
    *(torch.ones(2, heads, length, 8).to(torch.float8_e4m3fn) for heads, length in ((4, n), (2, n + 3), (2, n + 3))),
    *(t(2, 4).detach(), None, None, True, None, 0, 3, torch.float32),
)
DYNAMIC["grouped_scaled_gemm"] = lambda t, n: (
    *(torch.ones(n, 130).to(torch.float8_e4m3fn), torch.ones(3, n + 2, 130).to(torch.float8_e4m3fn).mT),
    *(torch.ones(n, 2), torch.ones(3, 1, n + 2), torch.tensor([2, 2, 3], dtype=torch.int32), [], "", "", torch.float32),
)
DYNAMIC["k_grouped_scaled_gemm"] = lambda t, n: (
    *(torch.ones(n, 130).to(torch.float8_e4m3fn), torch.ones(n + 2, 130).to(torch.float8_e4m3fn).mT),
    *(torch.ones(3, n, 1), torch.ones(1, 2, n + 2), torch.tensor([128, 128, 130], dtype=torch.int32), torch.float32),
)
DYNAMIC["masked_scaled_gemm"] = lambda t, n: (
    *(torch.ones(3, n, 130).to(torch.float8_e4m3fn), torch.ones(3, n + 2, 130).to(torch.float8_e4m3fn).mT),
    *(torch.ones(3, n, 2), torch.ones(3, 1, n + 2), torch.tensor([2, 0, 3], dtype=torch.int32)),
    *([], "", "", torch.float32),
)
DYNAMIC["grouped_dequant_gemm"] = lambda t, n: (
    *(
        t(n, 64),
        [torch.ones(3, n + 2, 32, dtype=torch.uint8)],
        [t(3, n + 2, 2)],
        [],
        torch.tensor([2, 2, 3], dtype=torch.int32),
    ),
    *(4, False, 8, [t(3, n + 2)], "g", "v0=add(acc0,x0);ret v0", torch.float32),
)
DYNAMIC["fused_norm_quantize"] = lambda t, n: (
    *(t(n, n + 1, 150).detach(), [t(n, 1, 150).detach(), t(150).detach()], "gr"),
    *("v0=add(acc0,x0);ret v0", "v0=mul(acc0,x1);ret v0", True, 1, True, torch.float32, 128, torch.float8_e4m3fn),
)
DYNAMIC["quantize_int8"] = lambda t, n: (t(n, n + 1, 150).detach(), 0)
DYNAMIC["silu_mul_quantize"] = lambda t, n: (
    *(t(n, n + 1, 150).detach(), t(n, n + 1, 150).detach()),
    128,
    torch.float8_e4m3fn,
)
DYNAMIC["quantize_fp8"] = lambda t, n: (t(n, n + 1, 150).detach(), 128, torch.float8_e4m3fn)
DYNAMIC["cross_entropy"] = lambda t, n: (t(n, n + 1, 7), torch.ones(n, n + 1).long(), t(7).detach().abs(), -1)
DYNAMIC["cross_entropy_backward"] = lambda t, n: (
    *(t(n, n + 1), t(n, n + 1, 7), torch.ones(n, n + 1).int(), t(n, n + 1).detach()),
    *(None, -1),
)
DYNAMIC["route"] = lambda t, n: (t(n, n + 1, 12), t(12).detach(), 3, "sigmoid", 4, 2)
DYNAMIC["group_tokens"] = lambda t, n: (torch.arange(2 * n).view(n, 2) % 5, 6)
DYNAMIC["linear_cross_entropy"] = lambda t, n: (t(n, n + 1, 7), t(5, 7), torch.ones(n, n + 1).long(), t(5))
DYNAMIC["linear_cross_entropy_gradients"] = lambda t, n: (
    *(t(n, n + 1).detach(), t(n, n + 1, 7), t(5, 7), torch.ones(n, n + 1).long(), t(5)),
)
DYNAMIC["conv"] = lambda t, n: (t(2, n, n + 1, 7), t(5, 3, 2, 7), t(5), t(2, n, n, 5), [], [1, 0])
DYNAMIC["causal_conv1d"] = lambda t, n: (t(n, n + 1, 7), t(7, 4), t(7), t(n, 3, 7), "silu")
DYNAMIC["causal_conv1d_backward"] = lambda t, n: (t(n, n + 1, 7), *DYNAMIC["causal_conv1d"](t, n))
DYNAMIC["causal_conv1d_update"] = lambda t, n: (t(n, n + 1), t(n, n + 1, 4), t(n + 1, 4), None, "silu")
DYNAMIC["ssd_chunk_scan"] = lambda t, n: (
    *(t(2, n, 4, 3), t(2, n, 4), -t(4).detach().abs(), t(2, n, 2, 5), t(2, n, 2, 5)),
    *(None, None, None, None, True),
)
DYNAMIC["ssd_chunk_scan_backward"] = lambda t, n: (
    *(t(2, n, 4, 3), None, *DYNAMIC["ssd_chunk_scan"](t, n)[:6]),
    *(None, None, True),
)
DYNAMIC["selective_state_update"] = lambda t, n: (
    *(t(n, 4, 3, 5), t(n, 4, 3), t(n, 4, 3), t(4, 3, 5), t(n, 2, 5), t(n, 2, 5)),
    *(None, None, None, True),
)
DYNAMIC["gated_delta_rule"] = lambda t, n: (
    *(t(2, n, 2, 3) / 4, t(2, n, 2, 3) / 4, t(2, n, 4, 5), -t(2, n, 4).detach().abs(), t(2, n, 4).detach().sigmoid()),
    *(None, None, None, True),
)
DYNAMIC["gated_delta_rule_backward"] = lambda t, n: (t(2, n, 4, 5), None, *DYNAMIC["gated_delta_rule"](t, n))
DYNAMIC["gated_delta_rule_step"] = lambda t, n: (
    t(n, 4, 3, 5),
    *(x[:, :1] for x in DYNAMIC["gated_delta_rule"](lambda *shape: t(n, 2, *shape[2:]), n)[:5]),
)
DYNAMIC["rwkv7"] = lambda t, n: (
    *(t(2, n, 2, 3) / 4, t(2, n, 2, 3) / 4, t(2, n, 2, 5), -t(2, n, 2, 3).detach().abs() / 4),
    *(t(2, n, 2, 3) / 4, t(2, n, 2, 3) / 4),
)
DYNAMIC["rwkv7_backward"] = lambda t, n: (t(2, n, 2, 5), None, *DYNAMIC["rwkv7"](t, n))
DYNAMIC["rwkv7_step"] = lambda t, n: (
    t(n, 2, 3, 5),
    *(x[:, :1] for x in DYNAMIC["rwkv7"](lambda *shape: t(n, 2, *shape[2:]), n)),
)
DYNAMIC["gated_linear_attention"] = lambda t, n: (
    *(t(2, n, 4, 3) / 4, t(2, n, 4, 3) / 4, t(2, n, 4, 5), -t(2, n, 4, 3).detach().abs()),
)
DYNAMIC["gated_linear_attention_backward"] = lambda t, n: (
    *(t(2, n, 4, 5), None, *DYNAMIC["gated_linear_attention"](t, n)),
)
DYNAMIC["gated_linear_attention_step"] = lambda t, n: (
    t(n, 4, 3, 5),
    *(x[:, :1] for x in DYNAMIC["gated_linear_attention"](lambda *shape: t(n, 2, *shape[2:]), n)),
)
DYNAMIC["attention_backward"] = lambda t, n: (
    t(2, 4, n, 6),
    *(t(2, 4, n, 8), t(2, 2, n + 3, 8), t(2, 2, n + 3, 6)),
    *(t(2, 4, n, 6), t(2, 4, n)),
    None,
    True,
)
for with_lse in ("attention", "attention_block_sparse", "attention_paged", "attention_varlen", "mla_decode"):
    DYNAMIC[f"{with_lse}_lse"] = DYNAMIC[with_lse]


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", OPS)
def test_dynamic_shapes_compile_once(name, train, maker):
    t = maker(11, torch.float32, train)
    # Sizes that meet no other size of the same call, which dynamo would take for a rule.
    calls = [DYNAMIC[name](t, n) for n in (13, 17, 22, 29)]
    assert count_frames(overload(name), calls) == 1


@pytest.mark.parametrize("name", OPS)
def test_inductor_runs_the_op(name, samples, tmp_path, monkeypatch):
    torch._dynamo.reset()
    args = samples(name, 21, torch.float32)[-1]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        got = torch.compile(lambda *a: overload(name)(*a), backend="inductor")(*args)
    for a, b in zip(outputs(got), outputs(overload(name)(*args)), strict=True):
        torch.testing.assert_close(a, b)


def test_tangents_are_refused(samples):
    """Those of torch's forward mode, which would be told that they are 0."""
    for name in ("softmax", "attention", "gemm", "mla_decode"):
        op, (first, *rest) = overload(name), samples(name, 3, torch.float32)[0]
        with forward_ad.dual_level():
            op(first, *rest)
            with pytest.raises(NotImplementedError, match=f"tile.{name}: an argument has a tangent"):
                op(forward_ad.make_dual(first, torch.ones_like(first)), *rest)
    x, w = torch.randn(3, 7), torch.randn(7, 5)
    for f, at in ((torch.ops.tile.softmax, x), (lambda b: torch_tile.ops.gemm(x, [b], dtype=x.dtype), w)):
        with pytest.raises(NotImplementedError, match="an argument has a tangent"):
            torch.func.jvp(f, (at,), (at,))


def test_flop_counter_knows_the_products(maker):
    from torch.utils.flop_counter import FlopCounterMode

    t = maker(1, torch.float32)

    def flops(f):
        with FlopCounterMode(display=False) as counter:
            f()
        return counter.get_total_flops()

    ops = torch.ops.tile
    x, w = t(2, 5, 7), t(9, 7)
    assert flops(lambda: ops.linear(x, w)) == flops(lambda: torch.nn.functional.linear(x, w)) == 2 * 10 * 7 * 9
    assert flops(lambda: ops.swiglu(x, w, w)) == 4 * 10 * 7 * 9
    assert flops(lambda: ops.gemm(x, [w.mT[None]], [], "", "", torch.float32)) == 2 * 10 * 7 * 9
    assert flops(lambda: ops.dequant_gemm(t(10, 7), [w.char()], [], [], *BYTES, torch.float32)) == 2 * 10 * 7 * 9
    groups = torch.tensor([2, 10], dtype=torch.int32)
    assert (
        flops(lambda: ops.grouped_gemm(t(10, 7), [t(2, 7, 9)] * 2, groups, [], "", "", torch.float32)) == 4 * 10 * 7 * 9
    )
    assert flops(lambda: ops.k_grouped_gemm(t(10, 7), t(10, 9), groups, torch.float32)) == 2 * 10 * 7 * 9
    q, k, v = t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6)
    assert flops(lambda: ops.attention(q, k, v)) == 2 * 2 * 4 * 5 * 7 * (8 + 6)
    assert flops(lambda: ops.attention_backward(t(2, 4, 5, 6), q, k, v, t(2, 4, 5, 6), t(2, 4, 5))) == (
        2 * 2 * 4 * 5 * 7 * (3 * 8 + 2 * 6)
    )
    latent = (t(2, 1, 3, 8), t(2, 1, 3, 4), t(2, 9, 8), t(2, 9, 4))
    assert flops(lambda: ops.mla_decode(*latent)) == 2 * 2 * 3 * 9 * (8 + 4 + 8)


def test_kernels_are_imported_at_the_first_call_only():
    script = """
import sys, torch
import torch_tile
assert hasattr(torch.ops.tile, "mla_decode")
heavy = {"torch_tile.kernels.gemm.gemm", "torch_tile.kernels.attention.forward", "torch_tile.jit", "sympy"}
late = heavy & set(sys.modules)
assert not late, late
torch.ops.tile.linear(torch.ones(2, 3), torch.ones(4, 3))
assert "torch_tile.kernels.gemm.gemm" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# What operators of these say is that they have none.
WITHOUT_GRADIENT = re.compile("quantize|scaled|fp8|index|select")
WITH_GRADIENT = [n for n, op in OPERATORS.items() if op.backward or op.in_training]
DIFFERENTIABLE = [n for n in WITH_GRADIENT if not WITHOUT_GRADIENT.search(n)]


def leaves_of(args):
    """The tensors of arguments that may want a gradient, and a function that puts others in their place."""
    leaves, form = torch.utils._pytree.tree_flatten(args)
    where = [n for n, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]

    def filled(tensors):
        full = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
        for n, t in zip(where, tensors, strict=True):
            full[n] = t
        return torch.utils._pytree.tree_unflatten(full, form)

    return [leaves[n].detach().clone() for n in where], filled


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_inside_of_transforms(name, samples):
    op = getattr(torch.ops.tile, name).default
    tensors, filled = leaves_of(next(iter(samples(name, 11, torch.float32, requires_grad=True))))

    def loss(given):
        result = op(*filled(given))
        found = [r for r in (result if isinstance(result, tuple | list) else [result]) if r.dtype.is_floating_point]
        return sum((r.float() * torch.linspace(-1, 1, r.numel()).reshape(r.shape)).sum() for r in found[:1])

    wanting = [t.clone().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(loss(wanting), wanting, allow_unused=True)
    wanted = [torch.zeros_like(t) if g is None else g for g, t in zip(wanted, tensors, strict=True)]
    for given in (torch.func.grad(loss)(tensors), torch.func.vjp(loss, tensors)[1](torch.tensor(1.0))[0]):
        for a, b in zip(given, wanted, strict=True):
            torch.testing.assert_close(a, b)
    batch = [torch.stack([t, t]) for t in tensors]
    for a, b in zip(torch.func.vmap(torch.func.grad(loss))(batch), wanted, strict=True):
        torch.testing.assert_close(a[1], b)


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if "group" not in n])  # whose gradients call a grouped op
def test_gradients_of_a_batch(name, samples):
    """`is_grads_batched`, as torch.autograd.functional.jacobian(vectorize=True) has it: torch's older vmap.

    That calls no operator with a list of tensors.
    """
    for args in samples(name, 12, torch.float32, requires_grad=True)[:2]:
        tensors, filled = leaves_of(args)
        given = [t.requires_grad_() for t in tensors]
        result = outputs(getattr(torch.ops.tile, name).default(*filled(given)))
        result = [r for r in result if r.requires_grad]
        grads = [torch.linspace(-1, 1, 2 * r.numel(), dtype=r.dtype).reshape(2, *r.shape) for r in result]
        options = {"allow_unused": True, "retain_graph": True}
        batch = torch.autograd.grad(result, given, grads, is_grads_batched=True, **options)
        for n in range(2):
            for a, b in zip(batch, torch.autograd.grad(result, given, [g[n] for g in grads], **options), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a[n], b, rtol=1e-4, atol=1e-4)
