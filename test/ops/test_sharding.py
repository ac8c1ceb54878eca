# SPDX-License-Identifier: Apache-2.0
"""Ops on DTensors of two processes: every sharding that a rule allows, and what DTensor makes of all others.

Run as a script, this file is one of the two processes.
"""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import torch_tile  # noqa: F401
from torch_tile.ops import launchers, pack_latents, sharding
from torch_tile.ops.reference import reference
from torch_tile.ops.registration import SCHEMAS
from torch_tile.ops.registry import OPERATORS

DRAWS = 6  # of placements at random, for each call


def sparse_calls(t, integers):
    """Calls of attention over lists."""
    each = integers([2, 1]).view(1, 1, 2), integers([1, 0, 1, 0]).view(1, 1, 2, 2)
    own = integers([2, 1] * 4).view(1, 4, 2), integers([1, 0, 1, 0] * 4).view(1, 4, 2, 2)
    blocks = t(2, 4, 20, 8), t(2, 2, 30, 8), t(2, 2, 30, 8)
    yield "attention_block_sparse", (*blocks, *each, None, None, 16, 16, True)
    yield "attention_block_sparse_lse", (*blocks, *own, None, None, 16, 16)
    yield "nsa_select", (t(2, 4, 6, 8).detach(), t(2, 2, 5, 8).detach(), t(2, 4, 6).detach(), 22, 3, 4, 4, 4)


def listed_calls(t, integers):
    """Calls of latent attention over lists, and of what makes them."""
    listed = integers([3, 0, -1, 6, 2, 1, 0, 5, -1, -1, 4, 2]).view(2, 2, 3)
    yield "index_scores", (t(4, 4, 3, 8).detach(), t(4, 8, 8).detach(), t(4, 4, 3).detach())
    yield "lightning_index", (t(4, 2, 3, 8).detach(), t(4, 7, 8).detach(), t(4, 2, 3).detach(), 5)
    yield "mla_sparse", (t(2, 2, 4, 8), t(2, 2, 4, 6), t(2, 7, 8), t(2, 7, 6), listed)
    packed = pack_latents(t(2, 7, 128), t(2, 7, 6))
    yield "mla_decode_fp8", (t(2, 2, 4, 128).detach(), t(2, 2, 4, 6).detach(), packed, None, None, listed)


def calls_of_convolutions(t):
    """(op, arguments) over images, and over the last times."""
    yield "conv", (t(4, 5, 3, 6), t(8, 2, 3, 6))
    yield "conv", (t(4, 5, 6), t(8, 2, 6), t(8), t(4, 3, 8), [2], [1, 0], [], "silu")
    yield "causal_conv1d", (t(4, 3, 6), t(6, 4), t(6), t(4, 3, 6), "silu")
    yield "causal_conv1d_update", (t(4, 6), t(4, 6, 4), t(6, 4))


def calls():
    """(op, arguments): sizes that two ranks share evenly, and some that they do not."""
    generator = torch.Generator().manual_seed(1)

    def t(*shape, by=1.0):
        return (torch.randn(shape, generator=generator) * by).requires_grad_()

    def integers(values):
        return torch.tensor(values, dtype=torch.int32)

    add = "v0=add(acc0,x0);v1=mul(v0,x1);v2=add(v1,x2);v3=mul(v2,x3);ret v3"
    q, k, v = t(2, 4, 6, 8), t(2, 2, 5, 8), t(2, 2, 5, 8)
    mask = torch.rand(2, 1, 6, 5, generator=generator) > 0.3
    latent = (t(2, 2, 4, 8), t(2, 2, 4, 6))
    yield "gemm", (t(4, 6), [t(6, 8)], [], "", "", torch.float32)
    yield "gemm", (t(3, 4, 6), [t(1, 6, 8), t(3, 6, 8)], [], "", "v0=mul(acc0,acc1);ret v0", torch.float32)
    yield "gemm", (t(4, 6), [t(6, 8)], [t(4, 8), t(8), t(4, 1), t(1)], "trcs", add, torch.float64)
    groups = integers([1, 1, 4])
    yield "grouped_gemm", (t(4, 6), [t(3, 6, 8)], groups, [], "", "", torch.float32)
    yield "grouped_gemm", (t(4, 6), [t(3, 6, 8)], groups, [t(4, 8), t(8), t(4, 1), t(1)], "trcs", add, torch.float32)
    yield "k_grouped_gemm", (t(4, 6), t(4, 8), groups, torch.float32)
    words, scale = torch.arange(128, dtype=torch.uint8).reshape(8, 16), "v0=mul(acc0,x0);ret v0"
    yield (
        "dequant_gemm",
        (t(4, 32), [words], [t(8, 2, by=0.02)], [t(8, 2)], 4, True, 8, [t(8)], "r", scale, torch.float32),
    )
    yield "linear", (t(4, 3, 6), t(8, 6))
    yield "linear", (t(4, 3, 6), t(8, 6), t(8), t(4, 3, 8))
    yield "linear", (t(4, 3, 6), t(8, 6), t(8), None, "gelu")
    yield "swiglu", (t(4, 3, 6), t(8, 6), t(8, 6))
    yield "attention", (q, k, v)
    yield "attention", (q, k, v, None, True)
    yield "attention", (q, t(2, 1, 5, 8), t(2, 1, 5, 8), mask)
    yield "attention", (t(2, 6, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8), None, True, None, 2)
    yield "attention_lse", (q, k, v, t(6, 5), False, 0.3)
    biased = "v0=mul(acc0,x0);v1=add(v0,x1);v2=where(x2,v1,-inf);ret v2"
    yield "attention", (q, k, v, None, False, None, 0, 0, [t(4, 1, 1), t(6, 5), mask], biased)
    placed = "v0=mul(i3,x0);v1=mul(v0,i2);v2=add(acc0,v1);ret v2"
    yield "attention", (q, k, v, None, False, None, 0, 0, [t(4, 1, 1)], placed)
    rows = t(6, 4, 8), t(7, 2, 8), t(7, 2, 8), integers([0, 2, 6]), integers([0, 0, 6]), 4, 6
    yield "attention_varlen", (*rows, True)
    yield "attention_varlen_lse", (*rows, False, 0.3, 2, [t(4, 1, 1).detach()], "v=mul(acc0,x0);ret v")
    yield from sparse_calls(t, integers)
    pages = t(4, 4, 2, 8), t(4, 4, 2, 6), integers([[1, 0], [3, 2]]), integers([5, 8])
    yield "attention_paged", (t(2, 2, 4, 8), *pages)
    yield "attention_paged_lse", (t(6, 4, 8), *pages, integers([0, 2, 6]), 4)
    yield "mla_decode", (*latent, t(2, 7, 8), t(2, 7, 6))
    yield "mla_decode", (*latent, t(4, 4, 8), t(4, 4, 6), integers([[1, 0], [3, 2]]), integers([5, 8]), 0.2)
    yield "mla_decode_lse", (*latent, t(2, 7, 8), t(2, 7, 6), None, integers([7, 3]))
    schedule = torch.ops.tile.mla_schedule(integers([7, 3]), 4, 2)
    yield "mla_decode", (*latent, t(2, 7, 8), t(2, 7, 6), None, integers([7, 3]), None, 0, schedule)
    yield "mla_schedule", (integers([70, 3]), 4, 2)
    yield from listed_calls(t, integers)
    yield "rms_norm", (t(4, 3, 8), t(8), 1e-5, "silu", 1.0, False)
    yield "rms_norm", (t(4, 8),)
    yield "add_rms_norm", (t(4, 3, 8), t(4, 3, 8), t(8))
    yield "layer_norm", (t(4, 3, 8), t(8), t(8))
    yield "layer_norm", (t(4, 3, 8), None, t(8))
    yield "softmax", (t(4, 3, 6), 1)
    yield "softmax", (t(4, 6), -1, torch.float64)
    classes = torch.tensor([[1, 7, -100], [0, 3, 2], [5, 5, 6], [-100, 1, 4]])
    yield "cross_entropy", (t(4, 3, 8), classes)
    yield "cross_entropy", (t(4, 3, 8), classes, t(8).detach().abs(), -100, 0.1, 0.01)
    yield "route", (t(4, 3, 8), t(8).detach(), 3, "sigmoid", 4, 2)
    yield "group_tokens", (classes % 8, 8)
    yield "linear_cross_entropy", (t(4, 3, 5), t(8, 5), classes, t(8), None, -100, 0.1, 0.01, 3.0)
    yield from calls_of_convolutions(t)
    decay = (-t(4).detach().abs()).requires_grad_()
    for groups in (1, 2):
        keys = t(2, 5, groups, 4), t(2, 5, groups, 4)
        yield "ssd_chunk_scan", (t(2, 5, 4, 3), t(2, 5, 4), decay, *keys, t(4), None, t(4), t(2, 4, 3, 4), True)
        numbers = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
        options = *(None,) * 4, False, 0.0, None, numbers
        yield "ssd_chunk_scan", (t(2, 5, 4, 3), t(2, 5, 4).detach().abs(), decay, *keys, *options)
    yield from calls_of_linear_attention(t)
    yield (
        "selective_state_update",
        (t(2, 4, 3, 5), t(2, 4, 3), t(2, 4, 3), t(4, 3, 5, by=0.2), t(2, 2, 5), t(2, 2, 5), t(4, 3), t(2, 4, 3)),
    )


def calls_of_linear_attention(t):
    """With and without the delta rule, and with decays of heads and of channels."""
    for heads in (1, 2):
        q, k = t(2, 5, heads, 4, by=0.3), t(2, 5, heads, 4, by=0.3)
        numbers = (-t(2, 5, 4).detach().abs()).requires_grad_(), t(2, 5, 4).detach().sigmoid().requires_grad_()
        yield "gated_delta_rule", (q, k, t(2, 5, 4, 3), *numbers, t(2, 4, 4, 3))
        yield "gated_delta_rule_step", (t(2, 4, 4, 3), q, k, t(2, 5, 4, 3), *numbers)
    q, k, channels = t(2, 5, 4, 4, by=0.3), t(2, 5, 4, 4, by=0.3), (-t(2, 5, 4, 4).detach().abs()).requires_grad_()
    yield "gated_delta_rule", (q, k, t(2, 5, 4, 3), channels, numbers[1])
    yield "gated_linear_attention", (q, k, t(2, 5, 4, 3), channels, t(2, 4, 4, 3))
    yield "gated_linear_attention_step", (t(2, 4, 4, 3), q, k, t(2, 5, 4, 3), numbers[0])
    b = t(2, 5, 4, 4, by=0.3), t(2, 5, 4, 4, by=0.3)  # each tensor once, for the sake of its gradient
    yield "rwkv7", (q, k, t(2, 5, 4, 3), channels, *b, t(2, 4, 4, 3))
    yield "rwkv7_step", (t(2, 4, 4, 3), q, k, t(2, 5, 4, 3), channels, *b)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


class Rank:
    """One of the two processes."""

    def __init__(self, rank, store):
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.mesh = dist.init_device_mesh("cpu", (2,))

    def place(self, args, placements):
        """The arguments as DTensors that want gradients where the originals do; placements in order of the tensors."""
        from torch.distributed.tensor import DTensor, Partial, distribute_tensor

        leaves, spec = tree_flatten(args)
        wanted = iter(placements)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                placement, value = next(wanted), leaf.detach()
                if isinstance(placement, Partial):
                    leaves[i] = DTensor.from_local(value * (0.25, 0.75)[self.mesh.get_rank()], self.mesh, [placement])
                else:
                    leaves[i] = distribute_tensor(value, self.mesh, [placement])
                leaves[i].requires_grad_(leaf.requires_grad)
        return tree_unflatten(leaves, spec)

    def check(self, name, args, placements, want_placements=None):
        """Values and gradients are the local ones; if placements of the outputs are given, nothing is sent for them."""
        from torch.distributed.tensor.debug import CommDebugMode

        op = getattr(torch.ops.tile, name)
        here = self.place(args, placements)
        with CommDebugMode() as sent:
            got = outputs(op(*here))
        if want_placements is not None:
            assert sent.get_total_counts() == 0, sent.get_comm_counts()
            assert [out.placements[0] for out in got] == list(want_placements)
        want = outputs(op(*args))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-5)
        self.check_gradients(here, got, args, want, twice=want_placements is not None)

    def check_gradients(self, here, got, args, want, twice):
        """First gradients, and those of the sum of their squares."""
        from torch.distributed.tensor import Replicate, distribute_tensor

        if not any(o.requires_grad for o in want):
            return
        upstream = [torch.randn_like(o) for o in want if o.requires_grad]
        everywhere = [distribute_tensor(u, self.mesh, [Replicate()]) for u in upstream]
        found = []
        for tensors, results, into in ((here, got, everywhere), (args, want, upstream)):
            leaves = [t for t in tree_leaves(tensors) if getattr(t, "requires_grad", False)]
            results = [o for o in results if o.requires_grad]
            first = torch.autograd.grad(results, leaves, into, create_graph=twice)
            found.append(list(first))
            if twice:
                squares = sum(g.square().sum() for g in first if g.requires_grad)
                found[-1] += torch.autograd.grad(squares, leaves, allow_unused=True)
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-3, atol=1e-4)


def allowed(rank, name, args):
    """The placements that the op's rule names for these arguments."""
    specs = tree_map_only(torch.Tensor, lambda t: SimpleNamespace(shape=t.shape), args)
    op = getattr(torch.ops.tile, name).default
    return sharding.placements(sharding.rule_of(op, specs), len(op._schema.returns), rank.mesh)


def check_every_argument_counts(rank):
    """A decision is not taken over by a call that differs in a flag or a text."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    q, k, v = (torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3))
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    for causal, want in ((False, [Shard(2)]), (True, None)):
        rank.check("attention", (q, k, v, None, causal, 0.3), [Shard(2), Replicate(), Replicate()], want)
    for epilogue, want in (("", [Partial()]), ("v0=relu(acc0);ret v0", None)):
        rank.check("gemm", (x, [w], [], "", epilogue, torch.float32), [Shard(1), Shard(0)], want)


def without_kernels():
    """Forwards in plain torch: building kernels takes longer than all else here, and they have tests of their own."""

    def set_op(name):
        def into(*args, out):
            for made, result in zip(tree_leaves(out), tree_leaves(reference(name, *args)), strict=True):
                made.copy_(result)

        setattr(launchers, name, into)

    for name in SCHEMAS:
        set_op(name)


def main(rank, store):
    from torch.distributed.tensor import Partial, Replicate, Shard

    without_kernels()
    torch.manual_seed(2)
    here = Rank(int(rank), store)
    choose = random.Random(3)
    for name, args in calls():
        for out, into in allowed(here, name, args):
            print(name, out, into, flush=True)
            here.check(name, args, into, out)
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        options = [
            [Replicate(), *(Shard(d) for d in range(t.dim())), *([Partial()] if t.is_floating_point() else [])]
            for t in tensors
        ]
        for _ in range(DRAWS):
            into = [choose.choice(o) for o in options]
            print(name, into, flush=True)
            here.check(name, args, into)
    check_every_argument_counts(here)
    torch.distributed.barrier()  # who leaves first would take the other down
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way


def test_values_and_gradients_on_two_ranks(two_ranks):
    two_ranks(__file__)


def names(op, *args, sizes=(2,)):
    """What may be sharded on a mesh of these sizes, arguments given by their shapes."""
    specs = [SimpleNamespace(shape=a) if isinstance(a, tuple) else a for a in args]
    mesh = SimpleNamespace(ndim=len(sizes), size=lambda i: sizes[i])
    rule = sharding.rule_of(getattr(torch.ops.tile, op).default, specs)
    found = sharding.placements(rule, 1, mesh)
    return [str(out[0]) for out, _ in found]


def test_what_may_be_sharded():
    qkv = (2, 8, 6, 4), (2, 4, 6, 4), (2, 4, 6, 4)
    assert names("attention", *qkv) == ["R", "S(0)", "S(1)", "S(2)"]
    assert names("attention", *qkv, None, True) == ["R", "S(0)", "S(1)"]  # a shard would not know its position
    assert names("attention", *qkv, None, False, None, 3) == ["R", "S(0)", "S(1)"]
    for index, free in (("i0", ["S(1)", "S(2)"]), ("i1", ["S(0)", "S(2)"]), ("i3", ["S(0)", "S(1)", "S(2)"])):
        text = f"v0=add(acc0,{index});ret v0"
        assert names("attention", *qkv, None, False, None, 0, 0, [], text) == ["R", *free]
    assert names("attention_fp8", *qkv) == ["R", "S(0)", "S(1)"]  # gloo sends no float8, so ranks compute none here
    assert names("linear", (4, 6), (8, 6)) == ["R", "S(0)", "S(1)", "P(sum)"]
    assert names("linear", (4, 6), (8, 6), None, None, "relu") == ["R", "S(0)", "S(1)"]
    assert names("gemm", (4, 6), [SimpleNamespace(shape=(6, 8))], [], "", "v0=relu(acc0);ret v0", None)[-1] == "S(1)"
    assert names("softmax", (2, 3, 4), -2) == ["R", "S(0)", "S(2)"]
    assert names("rms_norm", (2, 3, 4)) == ["R", "S(0)", "S(1)"]


@pytest.mark.parametrize(
    ("kv_heads", "sizes", "fine"),
    [(4, (2,), True), (3, (2,), False), (1, (2,), True), (4, (2, 2), True), (2, (2, 2), True), (6, (2, 2), False)],
)
def test_heads_stay_with_their_keys(kv_heads, sizes, fine):
    shapes = (2, 12, 6, 4), (2, kv_heads, 6, 4), (2, kv_heads, 6, 4)
    assert ("S(1)" in names("attention", *shapes, sizes=sizes)) == fine


def given_or_not(op, args, draw):
    """The arguments of a call, with some of the optional tensors left out."""
    kinds = [str(a.type) for a in op._schema.arguments]
    optional = [n for n, a in enumerate(args) if isinstance(a, torch.Tensor) and kinds[n] == "Optional[Tensor]"]
    left = set(optional) - {n for n in optional if draw.random() < 0.5}
    return [None if n in left else a for n, a in enumerate(args)]


@pytest.mark.parametrize("name", OPERATORS)
def test_rules_name_the_dimensions_of_every_tensor(name, samples, seed):
    """One entry for each tensor, None for one that is not there: a rule that left out one failed only in a call."""
    op, draw = getattr(torch.ops.tile, name).default, random.Random(seed)
    kinds = [str(a.type) for a in op._schema.arguments]
    for sample in samples(name, seed, torch.float32):
        for args in (sample, *(given_or_not(op, sample, draw) for _ in range(4))):
            full = [*args, *(a.default_value for a in op._schema.arguments[len(args) :])]
            tensors = []
            for kind, value in zip(kinds, full, strict=True):
                if "List[Tensor]" in kind:
                    tensors += value or ()
                elif "Tensor" in kind:
                    tensors.append(value)
            rule = sharding.rule_of(op, tree_map_only(torch.Tensor, lambda t: SimpleNamespace(shape=t.shape), full))
            assert [dims is None for dims in rule.inputs] == [t is None for t in tensors], args
            if args is not sample:  # as a whole such a call may be wrong
                continue
            assert [len(dims) for dims in rule.inputs if dims is not None] == [
                t.dim() for t in tensors if t is not None
            ]
            known = {dim for dims in rule.inputs if dims is not None for dim in dims}
            assert known.issuperset((*rule.free, *rule.summed, *rule.even)), rule
            assert len(rule.outputs) >= len(op._schema.returns) and not set(rule.free) & set(rule.summed)


SCRIPT = """
import sys, torch
{first}
LATE = "torch.distributed.tensor", "torch.utils.flop_counter"
before = set(sys.modules)
assert [{loaded}] * 2 == [name in before for name in LATE]
import torch_tile, gc, importlib.util
assert gc.isenabled()
# torch 2.11 imports its module of cached artifacts, which we extend, later than its successors.
artifacts = "torch.compiler._cache", "torch.utils._appending_byte_serializer"
new = set(sys.modules) - before - set(artifacts)
assert {loaded} or all(name.split(".")[0] == "torch_tile" for name in new), new
importlib.util.find_spec("torch.distributed.tensor")
assert [{loaded}] * 2 == [name in sys.modules for name in LATE]
import torch.distributed.tensor, torch.utils.flop_counter
from torch_tile.ops import when_imported
known = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
op = torch.ops.tile.linear
assert op.default in known and op in torch.utils.flop_counter.flop_registry
assert when_imported._finder not in sys.meta_path and not when_imported._finder.waiting
"""


@pytest.mark.parametrize("first", ["", "import torch.distributed.tensor, torch.utils.flop_counter"])
def test_registered_whoever_is_imported_first(first):
    script = SCRIPT.format(first=first, loaded=bool(first))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
