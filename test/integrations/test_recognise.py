# SPDX-License-Identifier: Apache-2.0
import __future__

import ast
import copy
import inspect
import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tile.nn as tnn
from torch_tile.integrations.recognise import activation_of, plan_for

annotations = __future__.annotations.compiler_flag
ALL = {"linear": True, "norm": True, "mlp": True, "attention": True}


class Norm(nn.Module):
    def __init__(self, offset: float = 0.0, cast_first: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(48)), 1e-5
        self.offset, self.cast_first = offset, cast_first

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cast_first:
            return (self.weight + self.offset) * self.normal(x).to(x.dtype)
        return (self.normal(x) * (self.weight.float() + self.offset)).to(x.dtype)


class MyRMSNorm(Norm):
    pass


class CentredRMSNorm(Norm):
    def normal(self, x: torch.Tensor) -> torch.Tensor:
        return super().normal(x - x.mean(-1, keepdim=True))


class OtherEpsRMSNorm(Norm):
    def normal(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-3)


class FailingRMSNorm(Norm):
    def normal(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("needs something else")


class MLP(nn.Module):
    def __init__(self, bias: bool = False, limit: float | None = None, swap: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias), nn.Linear(16, 24, bias)
        self.down_proj, self.act_fn = nn.Linear(24, 16, bias), nn.SiLU()
        self.limit, self.swap = limit, swap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.swap:
            gate, up = up, gate
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_first", [True, False])
def test_forms_of_rms_norms(offset: float, cast_first: bool, seed: int) -> None:
    plan = plan_for(MyRMSNorm(offset, cast_first), ALL)
    assert plan is not None and plan.new is tnn.RMSNorm
    expected = {"eps": 1e-5, "activation": "none", "weight_offset": offset, "cast_first": cast_first}
    expected |= {"names": ("x",), "gating": "none", "gate_rounded": False}
    assert plan.attributes == expected


@pytest.mark.parametrize("norm", [CentredRMSNorm, OtherEpsRMSNorm, FailingRMSNorm, Norm])
def test_other_norms_are_left_alone(norm: type[Norm]) -> None:
    assert plan_for(norm(), ALL) is None


def test_norms_over_several_dimensions_are_left_alone() -> None:
    assert plan_for(nn.LayerNorm((3, 4)), ALL) is None
    assert plan_for(nn.RMSNorm((3, 4)), ALL) is None


@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp(bias: bool) -> None:
    plan = plan_for(MLP(bias), ALL)
    assert plan is not None and plan.new is tnn.GatedMLP and plan.attributes["activation"] == "silu"


class DroppingMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("mlp", [MLP(limit=7.0), MLP(swap=True), DroppingMLP().eval()])
def test_other_mlps_are_left_alone(mlp: MLP) -> None:
    assert plan_for(mlp, ALL) is None


def test_watched_parts_of_an_mlp_are_called(seed: int) -> None:
    mlp = MLP()
    mlp.gate_proj.register_forward_hook(lambda module, args, out: out + 1)
    assert plan_for(mlp, ALL) is None


def test_derived_patched_and_quantised_linears_are_left_alone() -> None:
    class Lora(nn.Linear):
        pass

    class Packed(torch.Tensor):
        pass

    patched, packed = nn.Linear(3, 4), nn.Linear(3, 4)
    patched.forward = lambda x: x
    packed.weight = nn.Parameter(torch.randn(4, 3).as_subclass(Packed))
    assert plan_for(Lora(3, 4), ALL) is None
    assert plan_for(patched, ALL) is None
    assert plan_for(packed, ALL) is None
    assert plan_for(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), ALL) is None
    assert plan_for(nn.Linear(3, 4), {**ALL, "linear": False}) is None
    assert plan_for(nn.Linear(3, 4), ALL) is not None


def test_trials_leave_the_generator_and_the_layer_alone() -> None:
    norm = MyRMSNorm()
    weight, state = norm.weight, torch.random.get_rng_state()
    plan_for(norm, ALL)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert norm.weight is weight and type(norm) is MyRMSNorm and norm.training


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(inplace=False), "relu"),
        (F.silu, "silu"),
        (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))), "gelu_tanh"),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
        (nn.Sigmoid(), None),
        (nn.PReLU(), None),
        (nn.Softmax(-1), None),
        (nn.Sequential(nn.SiLU()), None),  # a part of it may get hooks
        (nn.Dropout(0.5).eval(), None),
        ("silu", None),
    ],
)
def test_activations(function: object, name: str | None) -> None:
    assert activation_of(function) == name


def norm_classes() -> list[type[nn.Module]]:
    """Every class of the installed transformers that is called an RMS norm and stands in a file of a model."""
    transformers = pytest.importorskip("transformers")
    folder = pathlib.Path(transformers.__file__).parent / "models"
    found: dict[str, ast.ClassDef] = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        tree = ast.parse(b"".join(classes_of(path.read_bytes())))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(ast.unparse(node).split("\n", 1)[1], node)
    spaces: dict[str, object] = {"torch": torch, "nn": nn, "F": F, "ACT2FN": {"silu": F.silu}}
    classes = []
    for node in found.values():
        node.decorator_list = []
        try:
            exec(compile(ast.Module([node], []), "norm", "exec", dont_inherit=True, flags=annotations), spaces)
        except (NameError, AttributeError):
            continue  # derived from what the file imports
        classes.append(spaces[node.name])
    return classes


def classes_of(text: bytes) -> list[bytes]:
    return re.findall(rb"^class \w*RMSNorm\w*\(.*\n(?:(?:[ \t].*)?\n)*", text, re.M)


def made(cls: type[nn.Module]) -> nn.Module | None:
    """A norm of 32 channels of that class; None if it wants something else."""
    taken = inspect.signature(cls.__init__).parameters
    more = {"group_size": 32} if "group_size" in taken else {}
    try:
        return cls(32, **more)
    except (TypeError, AttributeError, RuntimeError, NameError):
        return None


def test_norms_of_transformers_are_replaced_by_what_computes_the_same_or_left_alone() -> None:
    replaced, gated = 0, 0
    for cls in norm_classes():
        norm = made(cls)
        if norm is None:
            continue
        plan = plan_for(norm, ALL)
        if plan is None:
            continue
        names = list(inspect.signature(norm.forward).parameters)
        old = copy.deepcopy(norm)
        plan.apply(norm)
        given = {name: torch.randn(2, 3, 32) for name in names}
        torch.testing.assert_close(norm(**given), old(**given), msg=cls.__name__)
        torch.testing.assert_close(norm(*given.values()), old(*given.values()), msg=cls.__name__)
        with pytest.raises(TypeError):
            norm(*given.values(), None)
        replaced, gated = replaced + 1, gated + (len(names) == 2)
    assert replaced >= 8 and gated >= 3


class GroupedRMSNorm(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = x if gate is None else x * F.silu(gate)
        return self.weight * self.normal(x.unflatten(-1, (2, -1))).flatten(-2).to(x.dtype)


class ResidualRMSNorm(Norm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if residual is None else x + residual)


class OpenRMSNorm(Norm):
    def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("cls", [GroupedRMSNorm, ResidualRMSNorm, OpenRMSNorm])
def test_norms_that_take_something_else_are_left_alone(cls: type[nn.Module]) -> None:
    assert plan_for(cls(), ALL) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("cast_first", [True, False])
def test_gates_before_and_after_the_norm(dtype: torch.dtype, before: bool, rounded: bool, cast_first: bool) -> None:
    class GatedRMSNorm(Norm):
        def forward(self, hidden: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
            if z is None:
                return super().forward(hidden)
            factor = F.silu(z if rounded else z.float())
            x = hidden if rounded else hidden.float()
            x = x * factor if before else x
            y = self.normal(x)
            if cast_first:
                y = self.weight * y.to(hidden.dtype)
            else:
                y = y * self.weight.float()
                y = y.to(hidden.dtype) if rounded else y
            y = y if before else y * factor
            return y if cast_first and (before or rounded) else y.to(hidden.dtype)

    old = GatedRMSNorm(cast_first=cast_first).to(dtype)
    new = copy.deepcopy(old)
    plan = plan_for(new, ALL)
    assert plan is not None
    plan.apply(new)
    x, z = torch.randn(2, 5, 48).to(dtype), torch.randn(2, 5, 48).to(dtype)
    for given in ((x, z), (x,)):
        want = old(*given)
        assert (new(*given) == want).float().mean() > 0.98 or torch.allclose(new(*given), want, 1e-5, 1e-5)
        assert new(*given).dtype == want.dtype
    torch.testing.assert_close(new(z=z, hidden=x), new(x, z))
