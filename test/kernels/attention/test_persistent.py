# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of persistent blocks, by the interpreter of threads: on CPUs there is no such kernel."""

from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.forward import attention, reference
from torch_tile.kernels.attention.persistent import persistent_attention
from torch_tile.kernels.attention.spec import Config, Spec

TILING = Config(128, 128, 256, 2, packed=False, partial_sums=8, persistent=132, side=4)
FORMS = {  # dtype, widths of keys and values, rows of a block, causal
    "full": (torch.bfloat16, 128, 128, 128, False),
    "causal": (torch.float16, 128, 128, 128, True),
    "three consumers": (torch.bfloat16, 64, 64, 192, True),
    "one tile of queries": (torch.bfloat16, 192, 128, 128, True),
}


def spec_of(dtype=torch.bfloat16, width=128, **facts):
    return replace(Spec(dtype, width, width, True, False, False, None, False, True, 8, shifted=False), **facts)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, engine, problems, check):
    """Blocks with several tiles of odd lengths, or none, and queries that see no key."""
    dtype, width, v_width, rows, causal = FORMS[form]
    kv_heads, groups = problems.pick((1, 1), (1, 2), (2, 1))
    q_len, kv_len = problems.size(300), problems.size(300)
    q = problems.tensor(1, kv_heads * groups, q_len, width, dtype=dtype, layout="dense")
    k, v = (problems.tensor(1, kv_heads, kv_len, n, dtype=dtype, layout="dense") for n in (width, v_width))
    options = (None, causal, problems.pick(None, 0.3), 0, problems.pick(0, kv_len - q_len, -3, 5, -200))
    tiling = replace(TILING, block_q=rows, threads=2 * rows)
    tiling = replace(tiling, persistent=problems.pick(1, 2, 3), side=problems.pick(1, 2), heavy_first=causal)
    needs_lse = problems.pick(True, False)
    out, lse = attention(q, k, v, *options, config=tiling, needs_lse=needs_lse)
    want, want_lse = reference(*(x.double() for x in (q, k, v)), *options)
    what = f"{form} {tuple(q.shape)} {tuple(k.shape)} {options[1:]} {tiling}"
    check(out, want, what, dtype, empty_beside(q, v_width), 1.0)
    if needs_lse:
        assert torch.allclose(lse.double(), want_lse, atol=1e-3), what


@pytest.mark.parametrize("facts", [{}, {"causal": True}, {"causal": True, "grouped": True, "shifted": True}])
def test_the_assembler_has_nothing_to_say(facts):
    """Products wait for nothing but what the kernel says (C75xx advice tells of others), and no register is spilled."""
    kernel = persistent_attention.on(Target("cuda", 90))(TILING, spec_of(**facts), 2)
    assert not kernel.cubin.warnings
    assert not any(r.spills for r in kernel.resources.values())
