# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import replace

import pytest
import torch

from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.program import ARITY, Epilogue, Statement, evaluate, parse

SAFE = sorted(name for name, row in FUNCTIONS.items() if not row.singular and name not in ("div", "square"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "ret acc0"),
        ("dead=exp(x3);ret acc1", "ret acc1"),
        ("a=add(x0,acc0);b=add(acc0,x0);c=sub(a,b);ret c", "v0=add(acc0,x0);v1=sub(v0,v0);ret v1"),
        ("a=mul(1.0,acc0);b=add(a,0.0);c=neg(b);d=neg(c);ret d", "ret acc0"),
        ("a=max(acc0,0.0);ret a", "v0=relu(acc0);ret v0"),
        ("a=pow(acc0,2.0);ret a", "v0=square(acc0);ret v0"),
        ("a=mul(acc0,acc0);ret a", "v0=square(acc0);ret v0"),
        ("a=sqrt(acc0);b=div(1.0,a);ret b", "v0=rsqrt(acc0);ret v0"),
        ("a=exp(acc0);b=neg(a);c=add(1.0,a);d=div(1.0,c);ret d", "v0=neg(acc0);v1=sigmoid(v0);ret v1"),
        ("a=mul(2.0,1.0);ret a", "v0=mul(1.0,2.0);ret v0"),  # a result is never a number
        # silu
        (
            "v0=neg(acc0);v1=exp(v0);v2=add(v1,1.0);v3=div(acc0,v2);v4=mul(v3,acc1);ret v4",
            "v0=silu(acc0);v1=mul(acc1,v0);ret v1",
        ),
        ("s=sigmoid(acc0);v=mul(s,acc0);ret v", "v0=silu(acc0);ret v0"),
        (
            "b=add(acc0,x0);n=mul(b,-1.0);e=exp(n);d=add(1,e);r=reciprocal(d);v=mul(r,b);ret v",
            "v0=add(acc0,x0);v1=silu(v0);ret v1",
        ),
        ("s=sigmoid(acc0);v=mul(s,acc1);ret v", "v0=sigmoid(acc0);v1=mul(acc1,v0);ret v1"),
        # gelu
        (
            "h=mul(acc0,0.5);i=mul(acc0,0.7071067811865476);e=erf(i);o=add(e,1.0);v=mul(h,o);ret v",
            "v0=gelu(acc0);ret v0",
        ),
        ("i=div(acc0,1.41421356);e=erf(i);o=add(1,e);m=mul(acc0,o);v=mul(m,0.5);ret v", "v0=gelu(acc0);ret v0"),
        (
            "b=add(acc0,x0);i=mul(b,0.70710677);e=erf(i);o=add(1,e);h=mul(o,0.5);v=mul(h,b);ret v",
            "v0=add(acc0,x0);v1=gelu(v0);ret v1",
        ),
        ("h=mul(acc0,0.5);i=mul(acc0,0.7);e=erf(i);o=add(e,1.0);v=mul(h,o);ret v", None),
        # gelu_tanh: pow, x*x*x, and HF's x * (1 + 0.044715 x x)
        (
            "h=mul(acc0,0.5);p=pow(acc0,3.0);q=mul(p,0.044715);a=add(acc0,q);"
            "s=mul(a,0.7978845608028654);t=tanh(s);o=add(t,1.0);v=mul(h,o);ret v",
            "v0=gelu_tanh(acc0);ret v0",
        ),
        (
            "b=add(acc0,x0);h=mul(b,0.5);p=mul(b,b);r=mul(p,b);q=mul(r,0.044715);a=add(b,q);"
            "s=mul(a,0.7978845608028654);t=tanh(s);o=add(1.0,t);v=mul(h,o);ret v",
            "v0=add(acc0,x0);v1=gelu_tanh(v0);ret v1",
        ),
        (
            "a=mul(acc0,0.79788456);b=mul(0.044715,acc0);c=mul(b,acc0);d=add(1.0,c);"
            "e=mul(a,d);t=tanh(e);u=add(1.0,t);h=mul(0.5,acc0);v=mul(h,u);ret v",
            "v0=gelu_tanh(acc0);ret v0",
        ),
    ],
)
def test_rewrites(text, wanted):
    if wanted is None:  # close to a gelu, but not one
        assert "gelu" not in canonical(text)
    else:
        assert canonical(text) == wanted


FORMS = [(name, form) for name, row in FUNCTIONS.items() for form in row.written]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_the_written_forms_of_a_row_become_a_call(name, form, seed):
    """Whatever the operand, the order and the names, and what the form leaves out is 1."""
    rng = random.Random(seed)
    operands = ["x0" if "x0" in form else "1.0"] * (ARITY[name] - 1)
    want = canonical(f"v0=add(acc0,acc1);v1={name}({','.join(['v0', *operands])});v2=square(v1);ret v2")
    program = parse(form)
    inner = (Statement("z", "add", ("acc0", "acc1")),)
    renamed = tuple(
        replace(s, operands=tuple("z" if o == "acc0" else o for o in s.operands)) for s in program.statements
    )
    outer = (Statement("zz", "square", (program.result,)),)
    text = disguise(rng, Epilogue((*inner, *renamed, *outer), "zz"))
    assert canonical(text) == want
    values = [torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4 for _ in "ab"]
    aux = [torch.full((5,), 0.3, dtype=torch.float64)]
    torch.testing.assert_close(evaluate(want, values, aux), evaluate(text, values, aux))


@pytest.mark.parametrize(
    "text",
    [
        "a=exp(acc0);b=log1p(a);c=gt(acc1,20.0);d=where(c,acc0,b);ret d",
        "a=exp(acc0);b=log1p(a);c=gt(acc0,19.0);d=where(c,acc0,b);ret d",
        "a=exp(acc0);b=log1p(a);c=gt(acc0,20.0);d=where(c,b,acc0);ret d",
        "a=gt(0.0,acc0);b=expm1(acc0);c=where(a,acc0,b);ret c",
        "a=add(acc0,3.0);b=relu(a);c=min(b,6.0);d=mul(acc1,c);e=div(d,6.0);ret e",
    ],
)
def test_what_is_close_to_a_written_form_stays(text):
    assert not any(f"={name}(" in canonical(text) for name, _ in FORMS)


def random_program(rng, functions, length):
    names, statements = ["acc0", "acc1", "x0"], []
    for i in range(length):
        function = rng.choice(functions)
        picks = [rng.choice([*names, 0.5, -1.0, 1.0, 0.0, 2.0]) for _ in range(ARITY[function])]
        statements.append(Statement(f"t{i}", function, tuple(picks)))
        names.append(f"t{i}")
    return Epilogue(tuple(statements), names[-1])


def disguise(rng, program):
    """The same program with other names, another order, swapped operands, repeats and a dead statement."""
    names = {}
    ready, waiting, lines = [], list(program.statements), []
    defined = {s.name for s in program.statements}
    while waiting or ready:
        done = set(names)
        ready += [s for s in waiting if all(o not in defined or o in done for o in s.operands)]
        waiting = [s for s in waiting if s not in ready]
        s = ready.pop(rng.randrange(len(ready)))
        picks = [names.get(o, o) for o in s.operands]
        if s.function in ("add", "mul", "min", "max", "eq", "ne") and rng.random() < 0.5:
            picks.reverse()
        names[s.name] = f"r{len(lines)}"
        lines.append(Statement(names[s.name], s.function, tuple(picks)))
        if rng.random() < 0.3:
            lines.append(Statement(f"dead{len(lines)}", s.function, tuple(picks)))
            if rng.random() < 0.5:
                names[s.name] = lines[-1].name
    return str(Epilogue(tuple(lines), names[program.result]))


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_value_and_equal_ones_their_text(seed):
    rng = random.Random(seed)
    program = random_program(rng, SAFE, rng.randint(1, 14))
    text = canonical(str(program))
    assert canonical(text) == text
    for _ in range(3):
        assert canonical(disguise(rng, program)) == text
    g = torch.Generator().manual_seed(seed)
    acc = [torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(2)]
    aux = [torch.randn(5, generator=g, dtype=torch.float64)]
    torch.testing.assert_close(evaluate(text, acc, aux), evaluate(str(program), acc, aux))
    assert len(parse(text).statements) <= len(program.statements)


def test_a_long_chain_of_doublings_is_quick():
    doublings = ";".join(f"v{i + 1}=add(v{i},v{i});w{i + 1}=mul(v{i + 1},v{i + 1})" for i in range(60))
    assert canonical(f"v0=neg(acc0);{doublings};ret v60").count(";") == 61


def test_refuses_what_parse_refuses():
    with pytest.raises(ValueError, match="known functions"):
        canonical("v=frob(acc0);ret v")
