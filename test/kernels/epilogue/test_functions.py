# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.kernels.epilogue.functions import FUNCTIONS, Call

SPELLINGS = {x.packet: x for row in FUNCTIONS.values() for x in row.spellings()}


def test_rows_are_well_formed():
    for name, row in FUNCTIONS.items():
        assert row.name == name and len(row.gradient) in (0, row.arity)
        assert not (row.bounded and row.singular) and (row.arity == 2 or not row.commutative)


@pytest.mark.every_sample
def test_each_spelling_is_an_operator_of_one_row():
    packets = [x.packet for row in FUNCTIONS.values() for x in row.spellings()]
    assert len(set(packets)) == len(packets)
    assert all(hasattr(torch.ops.aten, packet) for packet in packets)


@pytest.mark.every_sample
@pytest.mark.parametrize("packet", sorted(SPELLINGS))
def test_a_spelling_binds_every_overload(packet):
    """The arguments of each overload that returns one tensor bind, whether given by position or by name."""
    overloads = getattr(torch.ops.aten, packet)
    bound = 0
    for name in overloads.overloads():
        schema = getattr(overloads, name)._schema
        if any(a.is_out for a in schema.arguments) or [str(r.type) for r in schema.returns] != ["Tensor"]:
            continue
        operands = [a for a in schema.arguments if not a.has_default_value()]
        options = {a.name: a.default_value for a in schema.arguments if a.has_default_value() and a.kwarg_only}
        rest = [a.default_value for a in schema.arguments if a.has_default_value() and not a.kwarg_only]
        for given in (operands, [*operands, *rest]):
            values = [a.name if hasattr(a, "name") else a for a in given if not getattr(a, "kwarg_only", False)]
            call = SPELLINGS[packet].bind(*values, **options)
            bound += call is not None
            assert call is None or (_is_well_formed(call) and "self" in [*call.leaves(), *values])
    assert bound or packet == "clamp"


def _is_well_formed(call):
    return len(call.operands) == FUNCTIONS[call.function].arity and all(
        _is_well_formed(x) for x in call.operands if isinstance(x, Call)
    )


def test_calls_are_read_in_order():
    call = Call("sub", ("a", Call("mul", ("b", 2))))
    assert list(call.leaves()) == ["a", "b", 2]
    assert call.reduce(str, lambda function, words: f"{function}({','.join(words)})") == "sub(a,mul(b,2))"
