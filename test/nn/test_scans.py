# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.nn import functional as F

from torch_tile.nn import linear_attention, scans


def test_a_convolution_in_parts(seed):
    """Whole, in two parts by final states, and token by token."""
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(5, 4), torch.randn(5)
    want = F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=5))
    torch.testing.assert_close(scans.causal_conv1d_fn(x, weight, bias, activation="silu"), want)
    first, state = scans.causal_conv1d_fn(x[:, :, :2], weight, bias, return_final_states=True, activation="swish")
    rest = scans.causal_conv1d_fn(x[:, :, 2:], weight, bias, initial_states=state, activation="silu")
    torch.testing.assert_close(torch.cat([first, rest], 2), want)
    state = torch.zeros(2, 5, 4)
    kept = state
    steps = [scans.causal_conv1d_update(x[:, :, t], state, weight, bias, "silu") for t in range(7)]
    steps += [scans.causal_conv1d_update(x[:, :, 7:], state, weight, bias, "silu")]
    torch.testing.assert_close(torch.cat([torch.stack(steps[:7], 2), steps[7]], 2), want)
    nothing = scans.causal_conv1d_update(x[:, :, 9:], state, weight, bias, "silu")
    assert nothing.shape == (2, 5, 0)
    assert kept is state
    torch.testing.assert_close(state, x[:, :, -4:])


def test_a_state_without_heads_has_one(seed):
    torch.manual_seed(seed)
    state, x, dt, A = torch.randn(2, 3, 5), torch.randn(2, 3), torch.randn(2, 3), -torch.rand(3, 5)
    B, C, D, z, bias = torch.randn(2, 5), torch.randn(2, 5), torch.randn(3), torch.randn(2, 3), torch.randn(3)
    step = F.softplus(dt + bias)
    new = state * torch.exp(step[..., None] * A) + (step * x)[..., None] * B[:, None]
    want = ((new * C[:, None]).sum(-1) + D * x) * F.silu(z)
    got = scans.selective_state_update(state, x, dt, A, B, C, D, z, bias, True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, new, rtol=1e-4, atol=1e-5)


def test_what_is_not_supported_is_refused():
    x, weight = torch.randn(2, 5, 9), torch.randn(5, 4)
    with pytest.raises(ValueError, match="causal_conv1d_fn: return_final_states is not supported"):
        scans.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(2, 9).int(), return_final_states=True)
    with pytest.raises(ValueError, match="causal_conv1d_fn: activation is 'gelu'"):
        scans.causal_conv1d_fn(x, weight, activation="gelu")
    keys = torch.randn(2, 9, 1, 4)
    given = torch.randn(2, 9, 3, 5), torch.randn(2, 9, 3), torch.randn(3), keys, keys, 64
    with pytest.raises(ValueError, match="mamba_chunk_scan_combined: return_varlen_states is not supported"):
        scans.mamba_chunk_scan_combined(*given, return_varlen_states=True)
    with pytest.raises(ValueError, match="mamba_chunk_scan_combined: x has 2 rows; expected 1"):
        scans.mamba_chunk_scan_combined(*given, cu_seqlens=torch.tensor([0, 4, 9]))


def test_packed_sequences_of_mamba(seed):
    """Numbers of sequences and their first times are one after the other what each sequence is alone."""
    torch.manual_seed(seed)
    keys = torch.randn(1, 9, 1, 4), torch.randn(1, 9, 1, 4)
    given = torch.randn(1, 9, 3, 5), torch.rand(1, 9, 3), -torch.rand(3), *keys
    got, state = scans.mamba_chunk_scan_combined(
        *given, 64, cu_seqlens=torch.tensor([0, 4, 4, 9]), return_final_states=True
    )
    numbers = torch.tensor([[0] * 4 + [2] * 5]).int()
    torch.testing.assert_close(scans.mamba_chunk_scan_combined(*given, 64, seq_idx=numbers), got)
    for begin, end in ((0, 4), (4, 9)):
        part = [t if t.dim() == 1 else t[:, begin:end] for t in given]
        want, last = scans.mamba_chunk_scan_combined(*part, 64, return_final_states=True)
        torch.testing.assert_close(got[:, begin:end], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_delta_rules_of_fla(seed):
    """Whole, token by token, and packed; without decays, too."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4), torch.randn(1, 5, 2, 3)
    g, beta, options = -torch.rand(1, 5, 2), torch.rand(1, 5, 2), {"use_qk_l2norm_in_kernel": True}
    want, state = linear_attention.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **options)
    got, last = linear_attention.fused_recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **options)
    torch.testing.assert_close((got, last), (want, state), rtol=1e-4, atol=1e-5)
    packed, none = linear_attention.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=torch.tensor([0, 2, 5]), **options
    )
    first, _ = linear_attention.chunk_gated_delta_rule(*(t[:, 2:] for t in (q, k, v, g, beta)), **options)
    assert none is None
    torch.testing.assert_close(packed[:, 2:], first, rtol=1e-4, atol=1e-5)
    plain, _ = linear_attention.fused_recurrent_gated_delta_rule(q, k, v, scale=0.5, **options)
    alike, _ = linear_attention.chunk_gated_delta_rule(q, k, v, 0 * g, beta.new_ones(1, 5, 2), 0.5, **options)
    torch.testing.assert_close(plain, alike, rtol=1e-4, atol=1e-5)


def test_linear_attention_of_fla(seed):
    """Whole, token by token, and packed; RetNet's and lightning attention's decays are those of their papers."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3)
    g = -torch.rand(1, 5, 2, 4)
    want, state = linear_attention.chunk_gla(q, k, v, g, output_final_state=True)
    got, last = linear_attention.fused_recurrent_gla(q, k, v, g, output_final_state=True)
    torch.testing.assert_close((got, last), (want, state), rtol=1e-4, atol=1e-5)
    packed, none = linear_attention.fused_recurrent_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 2, 5]))
    rest, _ = linear_attention.chunk_gla(*(t[:, 2:] for t in (q, k, v, g)))
    assert none is None
    torch.testing.assert_close(packed[:, 2:], rest, rtol=1e-4, atol=1e-5)
    times = torch.arange(5.0)
    between = (times[:, None] - times).tril()
    for found, gammas in (
        (linear_attention.chunk_retention(q, k, v), [1 - 2.0**-5, 1 - 2.0**-6]),
        (linear_attention.chunk_lightning_attn(q, k, v, 1, 4), [1.0, math.exp(-4 * 0.75)]),
        (linear_attention.chunk_linear_attn(q, k, v, normalize=False), [1.0, 1.0]),
    ):
        for head, gamma in enumerate(gammas):
            pairs = (q[0, :, head] @ k[0, :, head].T / 2 * gamma**between).tril()
            torch.testing.assert_close(found[0][0, :, head], pairs @ v[0, :, head], rtol=1e-4, atol=1e-5)
    q, k = q.abs(), k.abs()
    normal, _ = linear_attention.chunk_linear_attn(q, k, torch.ones_like(v))
    torch.testing.assert_close(normal, torch.ones_like(v), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="fused_recurrent_gla: gv is not supported"):
        linear_attention.fused_recurrent_gla(q, k, v, gv=v)


def test_rwkv7_of_fla(seed):
    """Whole, token by token, and packed; from normalized keys and their rates, too."""
    torch.manual_seed(seed)
    shape = 1, 5, 2, 4
    r, k, w, v = torch.randn(shape), torch.randn(shape), -torch.rand(shape) / 2, torch.randn(1, 5, 2, 3)
    kk, rate = F.normalize(torch.randn(shape), dim=3), torch.rand(shape)
    want = linear_attention.chunk_rwkv7(r, w, k, v, -kk, kk * rate)
    got = linear_attention.fused_mul_recurrent_rwkv7(r, w, k, v, kk, rate)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    starts = torch.tensor([0, 2, 5])
    packed, none = linear_attention.fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * rate, w, cu_seqlens=starts)
    rest, _ = linear_attention.chunk_dplr_delta_rule(*(t[:, 2:] for t in (r, k, v, -kk, kk * rate, w)))
    assert none is None
    torch.testing.assert_close(packed[:, 2:], rest, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="fused_mul_recurrent_rwkv7: reverse is not supported"):
        linear_attention.fused_mul_recurrent_rwkv7(r, w, k, v, kk, rate, reverse=True)


def test_kimi_delta_attention_token_by_token(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3)
    given = q, k, v, -torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want = linear_attention.chunk_kda(*given, **options)
    torch.testing.assert_close(linear_attention.fused_recurrent_kda(*given, **options), want, rtol=1e-4, atol=1e-5)
