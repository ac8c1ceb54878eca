# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.kernels.common import Machine
from torch_tile.kernels.norm.fused import FusedSpec, Operand, fused_norm, fused_norm_rows, reference
from torch_tile.kernels.norm.tiling import Config, config_for

MODULATE = "v0=add(x0,1.0);v1=mul(acc0,v0);v2=add(v1,x1);ret v2"
GATE = "v0=mul(x3,x2);v1=add(acc0,v0);ret v1"


def test_reference_is_a_modulated_norm_of_a_gated_residual():
    x, y = torch.randn(2, 2, 5, 9, dtype=torch.float64)
    shift, scale, gate = torch.randn(3, 2, 1, 9, dtype=torch.float64)
    total = x + gate * y
    for centred in (False, True):
        norm = F.layer_norm(total, (9,), eps=1e-4) if centred else F.rms_norm(total, (9,), eps=1e-4)
        got, kept = reference(x, [scale, shift, gate, y], "gggt", GATE, MODULATE, centred, 1e-4, True, torch.float64)
        torch.testing.assert_close(got, norm * (1 + scale) + shift)
        torch.testing.assert_close(kept, total)


WHOLE, PIECES = Config(rows=4, width=128, whole=True), Config(rows=2, width=32, whole=False)


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_random_problems(dtype, centred, rounds, problems, check):
    for _ in rounds(6):
        lead = problems.pick((problems.size(9),), (problems.size(3), problems.size(6)), (2, problems.size(3), 3))
        n = problems.size(120)
        kinds, aux = "", []
        cut = problems.random.randrange(len(lead) + 1)  # rows come in runs behind this many dimensions
        for _ in range(4):
            kind = problems.pick(*"tgrcs")
            sizes = {"t": (*lead, n), "g": (*lead[:cut], *[1] * (len(lead) - cut), n), "r": (n,), "c": (*lead, 1)}
            aux.append(problems.tensor(*sizes.get(kind, ()), dtype=problems.pick(dtype, dtype, torch.float32)))
            kinds += kind
        x = problems.tensor(*lead, n, dtype=dtype) + problems.pick(0, 3)
        prologue = problems.pick("", GATE, "v0=mul(acc0,x3);v1=add(v0,1.0);ret v1")
        epilogue = problems.pick("", MODULATE, "v0=mul(acc0,x2);v1=silu(v0);ret v1")
        out = torch.promote_types(dtype, problems.pick(dtype, torch.float32))
        options, keep = (epilogue, centred, problems.pick(1e-5, 0.1)), problems.pick(False, True)
        arguments = (kinds, prologue, *options, keep)
        config = problems.pick(WHOLE, PIECES, None)
        got, total = fused_norm(x, aux, *arguments, out, config=config)
        _, rounded = reference(x, aux, kinds, prologue, *options, True, out)
        wide = [v.double() for v in (rounded, *aux)]
        want, _ = reference(wide[0], wide[1:], kinds, "", *options, False, torch.float64)
        what = f"{tuple(x.shape)} {x.stride()} {arguments} {config}"
        assert got.dtype == out
        check(got, want, what, dtype)
        check(total, (rounded if keep else rounded.new_empty(0)).double(), what, dtype)


@pytest.mark.parametrize("n", [1, 8193])
def test_long_rows(n, problems, check):
    x, y = problems.tensor(2, 3, n), problems.tensor(2, 3, n)
    aux = [problems.tensor(2, 1, n) for _ in range(3)] + [y]
    arguments = ("gggt", GATE, MODULATE, True, 1e-5, True)
    want = reference(x.double(), [v.double() for v in aux], *arguments, torch.float64)
    for got, expected in zip(fused_norm(x, aux, *arguments, x.dtype), want, strict=True):
        check(got, expected, str(n))


def test_rows_that_begin_anywhere_have_operands_that_do():
    machine = Machine(Target("cuda", 90), 132)
    half = torch.float16
    aux = tuple(Operand(kind, half, False) for kind in "gggt")
    spec = FusedSpec(half, half, aux, GATE, MODULATE, True, True)
    kernel = machine.kernel(fused_norm_rows)(config_for(8, 1, machine), spec)
    asked = {b.name: kernel.launcher.alignments[b] for b in kernel.program.params if isinstance(b, Buffer)}
    assert len(asked) == 7 and set(asked.values()) == {2}
