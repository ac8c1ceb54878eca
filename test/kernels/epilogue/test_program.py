# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from torch_tile.kernels.epilogue.program import ACTIVATIONS, ARITY, evaluate, of_layer, parse

FUNCTIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: a**-0.5,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
    "tanh": math.tanh,
    "erf": math.erf,
    "erfc": math.erfc,
    "sin": math.sin,
    "cos": math.cos,
    "abs": abs,
    "relu": lambda a: max(a, 0.0),
    "silu": lambda a: a / (1 + math.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1 + math.erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a: 0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "min": min,
    "max": max,
    "pow": lambda a, b: a**b,
    "square": lambda a: a * a,
    "reciprocal": lambda a: 1 / a,
    "floor": math.floor,
    "expm1": math.expm1,
    "log1p": math.log1p,
    "sign": lambda a: float((a > 0) - (a < 0)),
    "softplus": lambda a: math.log1p(math.exp(a)),
    "logsigmoid": lambda a: -math.log1p(math.exp(-a)),
    "mish": lambda a: a * math.tanh(math.log1p(math.exp(a))),
    "leaky_relu": lambda a, b: a if a > 0 else a * b,
    "elu": lambda a, b: a if a > 0 else b * math.expm1(a),
    "hardsigmoid": lambda a: min(max(a + 3, 0), 6) / 6,
    "hardswish": lambda a: a * min(max(a + 3, 0), 6) / 6,
    "where": lambda c, a, b: a if c else b,
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
}


def test_the_table_and_its_meaning_have_the_same_functions():
    assert set(FUNCTIONS) == set(ARITY)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", sorted(ARITY))
def test_every_function_means_what_python_says(name, seed, one_function):
    text, values = one_function(name, seed)
    got = evaluate(text, values[:1], values[1:])
    want = [FUNCTIONS[name](*row) for row in zip(*(v.flatten().tolist() for v in values[: ARITY[name]]), strict=True)]
    torch.testing.assert_close(got.flatten(), torch.tensor(want, dtype=torch.float64))


def test_programs_share_values_and_broadcast():
    acc, row = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    got = evaluate("a=add(acc0,x0);b=mul(a,a);c=sub(b,0.5);ret c", [acc], [row])
    torch.testing.assert_close(got, (acc + row) ** 2 - 0.5)
    torch.testing.assert_close(evaluate("", [acc], []), acc)
    torch.testing.assert_close(evaluate("ret x0", [acc], [row]), row.expand(4, 3))
    assert evaluate("v=div(1.0,0);ret v", [acc], []).isinf().all()


def test_parse_prints_back_and_lists_inputs():
    text = "v0=add(acc0,x1);b_2=max(v0,-1.5);c=where(b_2,acc3,1e-06);ret c"
    epilogue = parse(text)
    assert str(epilogue) == text
    assert epilogue.inputs("acc") == {0, 3} and epilogue.inputs("x") == {1}
    assert str(parse("")) == "ret acc0"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layer_text(activation, bias, residual):
    functional = torch.nn.functional
    act = {
        "none": lambda t: t,
        "relu": functional.relu,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    }[activation]
    acc, b, r = torch.randn(4, 3), torch.randn(3), torch.randn(4, 3)
    got = evaluate(of_layer(activation, bias, residual), [acc], [b] * bias + [r] * residual)
    torch.testing.assert_close(got, act(acc + b if bias else acc) + (r if residual else 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v0=add(acc0,x0)", "must be 'ret NAME'"),
        ("ret 1.0", "must be 'ret NAME'"),
        ("ret", "must be 'ret NAME'"),
        ("ret v0", "no earlier name"),
        ("v0=add(v1,acc0);v1=neg(acc0);ret v0", "'v1', which is no earlier name"),
        ("v0=add(acc0);ret v0", "1 operands; it takes 2"),
        ("v0=relu();ret v0", "0 operands; it takes 1"),
        ("v0=frob(acc0);ret v0", "known functions are abs, add"),
        ("v0 = relu(acc0);ret v0", "not a statement"),
        ("v0=relu(acc0);;ret v0", "not a statement"),
        ("v0=relu(exp(acc0));ret v0", "not a statement"),
        ("v0=relu(acc0);v0=exp(v0);ret v0", "every name is set once"),
        ("x0=relu(acc0);ret x0", "is taken"),
        ("acc1=relu(acc0);ret acc1", "is taken"),
        ("v0=relu(acc01);ret v0", "no earlier name"),
        ("v0=add(acc0,1.0.0);ret v0", "no number"),
        ("v0=relu(acc2);ret v0", "number of products is 2"),
        ("v0=relu(x1);ret v0", "number of auxiliary operands is 1"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ValueError, match="epilogue: ") as error:
        parse(text, 2, 1)
    assert message in str(error.value)
