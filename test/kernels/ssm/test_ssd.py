# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch
from rounding import Rounding
from torch.nn import functional as F

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.ssm import update
from torch_tile.kernels.ssm.args import GRADIENTS, SsdChunkScanArgs
from torch_tile.kernels.ssm.ssd import (
    Config,
    Scan,
    Work,
    chunk_states,
    config_for,
    config_of_scan,
    config_of_states,
    gradient_reference,
    heads_of,
    reference,
    ssd_chunk_scan,
    ssd_chunk_scan_backward,
)
from torch_tile.kernels.ssm.ssd_carry import Problem, carry_config_for
from torch_tile.kernels.ssm.ssd_whole import whole_config_for
from torch_tile.kernels.ssm.tiles import Spec

TINY = Config(chunk=32, rows=16, step=16, head_tile=16, state_tile=16, threads=32, stages=1)
HELD = replace(TINY, state_tile=32, heads=2, head_stages=1, staged=True)  # holds the keys and scores of two heads
CARRIED = replace(TINY, carried=True)  # one kernel has the states between chunks
HOPPER = Config(chunk=128, head_stages=1, blocks=2, carried=True)
WHOLE = Config(chunk=16, rows=16, step=16, head_tile=16, state_tile=32, threads=32, stages=1, whole=True)


def recurrence(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    softplus=False,
    low=0.0,
    high=None,
    seq_idx=None,
):
    """The scan, one time after the other."""
    share = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(share, 2), C.repeat_interleave(share, 2)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if softplus else dt).clamp(low, high)
    state = x.new_zeros(*x.shape[::2], x.shape[3], B.shape[3]) if initial_states is None else initial_states
    out = []
    for t in range(x.shape[1]):
        added = torch.einsum("bhp,bhn,bh->bhpn", x[:, t], B[:, t], dt[:, t])
        if t and seq_idx is not None:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        state = state * torch.exp(dt[:, t] * A)[..., None, None] + added
        y = torch.einsum("bhpn,bhn->bhp", state, C[:, t])
        y = y if D is None else y + x[:, t] * (D[:, None] if D.dim() == 1 else D)
        out.append(y if z is None else y * F.silu(z[:, t]))
    return torch.stack(out, 1), state


def problem(problems, dtype, most_times, most):
    """Arguments of a scan as keywords, with or without what is optional."""
    b, length, groups, shares = problems.size(2), problems.size(most_times), problems.pick(1, 2), problems.pick(1, 3)
    heads, head_dim, states = groups * shares, problems.size(most), problems.size(most)
    tensor = problems.tensor
    given = {
        "x": tensor(b, length, heads, head_dim, dtype=dtype),
        "dt": tensor(b, length, heads, dtype=problems.pick(dtype, torch.float32)),
        "A": -tensor(heads, dtype=torch.float32).abs() - 0.01,
        "B": tensor(b, length, groups, states, dtype=dtype),
        "C": tensor(b, length, groups, states, dtype=dtype),
        "D": problems.pick(None, tensor(heads), tensor(heads, head_dim, dtype=dtype)),
        "dt_bias": problems.pick(None, tensor(heads)),
        "initial_states": problems.pick(None, tensor(b, heads, head_dim, states, dtype=dtype)),
        "seq_idx": problems.pick(None, sequences(problems, b, length)),
    }
    options = {"dt_softplus": problems.pick(True, False), "dt_max": problems.pick(None, 1.25)}
    return given, options, f"{[b, length, groups, heads, head_dim, states]} {options} {given['x'].stride()}"


def sequences(problems, b, length):
    """Numbers of packed sequences, of which some come again; a length of 1 and whole chunks may be among them."""
    often = problems.pick(2, 20, 90)
    begins = torch.randint(often, (b, length), generator=problems.generator) == 0
    return (begins.cumsum(1) % 3).to(problems.pick(torch.int32, torch.int64))


def double(given):
    return {n: t if t is None or not t.is_floating_point() else t.double() for n, t in given.items()}


@pytest.mark.parametrize("full", [False, True])
def test_reference_is_the_recurrence(full, problems):
    def t(*shape):
        return torch.randn(shape, generator=problems.generator, dtype=torch.float64).requires_grad_()

    numbers = torch.tensor([[0] * 30 + [1] * 40 + [0] * 20, [2] * 64 + [3, 4] + [5] * 24])
    more = (t(4, 3), t(2, 90, 4, 3), t(4), t(2, 4, 3, 5)) if full else (None,) * 4
    numbers = numbers if full else None
    given = (t(2, 90, 4, 3), t(2, 90, 4), -torch.rand(4).double(), t(2, 90, 2, 5), t(2, 90, 2, 5), *more)
    want = recurrence(*given, softplus=True, seq_idx=numbers)
    got = reference(*given, True, seq_idx=numbers)
    torch.testing.assert_close(got, want)
    leaves = [x for x in given if x is not None and x.requires_grad]
    grads = [torch.randn_like(y) for y in want]
    expected = torch.autograd.grad(want, leaves, grads)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grads), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    few = engine != "cpu"
    for _ in rounds(3):
        given, options, what = problem(problems, dtype, 45 if few else 300, 20 if few else 90)
        z = problems.pick(None, problems.tensor(*given["x"].shape, dtype=dtype))
        config = problems.pick(TINY, HELD, CARRIED, WHOLE) if few else None
        found = ssd_chunk_scan(**given, z=z, **options, config=config)
        limits = {"softplus": options["dt_softplus"], "high": options["dt_max"]}
        wide = double(given)
        gate = None if z is None else z.double()
        rounding = Rounding(reference, **wide, z=gate, **options)
        for n, (got, want) in enumerate(zip(found, recurrence(**wide, z=gate, **limits), strict=True)):
            check(got, want, what, dtype, own=True, rounding=rounding[n])
        if engine == "text":  # one of its kernels after the other takes too long
            continue
        grad = problems.tensor(*given["x"].shape, dtype=dtype)
        grad_states = problems.pick(None, problems.tensor(*found[1].shape))
        found = ssd_chunk_scan_backward(grad, grad_states, **given, **options, config=config)
        upstream = grad.double(), None if grad_states is None else grad_states.double()
        wants = gradient_reference(*upstream, **wide, **options)
        rounding = Rounding(gradient_reference, *upstream, **wide, **options)
        of_dt = wants[GRADIENTS.index("dt")]
        of_bias = Rounding(lambda terms: terms.sum((0, 1)), of_dt, dtype=dtype)[0]  # whose terms may cancel
        for n, (name, got, want) in enumerate(zip(GRADIENTS, found, wants, strict=True)):
            bound = of_bias if name == "dt_bias" else rounding[n]
            check(got, want, f"{name} {what}", dtype, own=True, rounding=bound)


@pytest.mark.parametrize("decay", [-1.0, -1e2, -1e4])
def test_powers_between_times_that_no_path_joins_stay_out(decay, engine, problems, check):
    """Backwards in time a decay is a power without bound, which no result may see, whatever the scores there hold."""
    dtype = torch.float32
    shape = 1, 40, 2, 8
    x, dt = problems.tensor(*shape, dtype=dtype), torch.rand(1, 40, 2) + 0.5
    B, C = (problems.tensor(1, 40, 1, 12, dtype=dtype) for _ in range(2))
    given = x, dt, torch.tensor([decay, decay / 7]), B, C
    wide = [t.double() for t in given]
    config = None if engine == "cpu" else problems.pick(HELD, CARRIED)
    rounding = Rounding(reference, *wide)
    for n, (got, want) in enumerate(zip(ssd_chunk_scan(*given, config=config), recurrence(*wide), strict=True)):
        check(got, want, f"decay {decay}", dtype, own=True, rounding=rounding[n])
    if engine == "text":
        return
    grad = problems.tensor(*shape, dtype=dtype)
    found = ssd_chunk_scan_backward(grad, None, *given, config=config)[:5]
    wants = gradient_reference(grad.double(), None, *wide)[:5]
    rounding = Rounding(gradient_reference, grad.double(), None, *wide)
    for n, (name, got, want) in enumerate(zip(GRADIENTS, found, wants, strict=False)):
        check(got, want, f"{name} decay {decay}", dtype, own=True, rounding=rounding[n])


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
def test_states_by_the_tiles_of_hopper(width, engine, problems, check):
    """Bulk copies and wgmma: blocks that carry states through chunks, and those that take heads in turn."""
    dtype, b, length, heads, p, n = torch.bfloat16, 1, 261, 3, 72, 136  # three chunks, two tiles of P and of states
    x, grad = (problems.tensor(b, length, heads, p, dtype=dtype, layout="dense") for _ in range(2))
    keys = [problems.tensor(b, length, 1, n, dtype=dtype, layout="dense") / 4 for _ in range(2)]
    initial, dt = problems.tensor(b, heads, p, n), torch.rand(b, length, heads) / 8
    args = SsdChunkScanArgs(x, dt, torch.tensor([-0.1, -1.0, -9.0]), *keys)
    scan = Scan(args, replace(HOPPER, state_tile=width), x)
    last, first = (scan.empty(b, heads, p, n) for _ in range(2))
    (before,) = scan.between(scan.x, initial, last)
    behind, ends = scan.between(grad, None, first, before)
    own = scan.empty(b, scan.chunks + 1, heads, p, n)
    held = replace(HOPPER, heads=2, state_tile=128)
    scan.run(chunk_states, scan.plain, scan.x, scan.B, scan.steps, scan.decays, own, config=held)

    chunked = [
        F.pad(t.double(), (0, 0, 0, 0, 0, scan.padded - length)).unflatten(1, (-1, 128)) for t in (x, grad, *keys)
    ]
    decays, steps = (t.double().unflatten(2, (-1, 128)) for t in (scan.decays[:, :heads], scan.steps[:, :heads]))
    keep, to_end = torch.exp2(decays[..., -1]), torch.exp2(decays[..., -1:] - decays) * steps
    wanted_own = torch.einsum("bcqhp,bcqgn,bhcq->bchpn", chunked[0], chunked[2], to_end)
    back = torch.einsum("bcqhp,bcqgn,bhcq->bchpn", chunked[1], chunked[3], torch.exp2(decays))
    check(own[:, :-1], wanted_own, "own states", dtype, own=True)
    state, gradient = initial.double(), torch.zeros_like(initial).double()
    for c in range(scan.chunks):
        check(before[:, c], state, f"before chunk {c}", dtype, own=True)
        state = state * keep[:, :, c, None, None] + wanted_own[:, c]
    check(before[:, -1], state, "behind all", dtype, own=True)
    check(last, state, "last", dtype, own=True)
    for c in reversed(range(scan.chunks)):
        check(behind[:, c + 1], gradient, f"behind chunk {c}", dtype, own=True)
        left = gradient * keep[:, :, c, None, None]
        check(ends[:, :, c].sum(-1), (before[:, c].double() * left).sum((2, 3)), f"end of chunk {c}", dtype, own=True)
        gradient = left + back[:, c]
    check(first, gradient, "first", dtype, own=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token(dtype, rounds, engine, problems, check):
    for _ in rounds(4):
        groups, shares, b, p = problems.pick(1, 2), problems.pick(1, 3), problems.size(3), problems.size(20)
        h, n, tensor = groups * shares, problems.size(40 if engine in ("threads", "text") else 150), problems.tensor
        given = [
            tensor(b, h, p, n, dtype=torch.float32),
            tensor(b, h, p, dtype=dtype),
            tensor(b, h, 1).expand(-1, -1, p),
        ]
        given += [-tensor(h, 1, 1).abs().expand(-1, p, n), tensor(b, groups, n, dtype=dtype)]
        given += [tensor(b, groups, n, dtype=dtype), problems.pick(None, tensor(h, p, dtype=dtype))]
        given += [problems.pick(None, tensor(b, h, p, dtype=dtype)), problems.pick(None, tensor(h, 1).expand(-1, p))]
        found = update.selective_state_update(*given, True)
        wants = update.reference(*[None if t is None else t.double() for t in given], True)
        for got, want in zip(found, wants, strict=True):
            check(got, want, f"{b} {h} {p} {n}", dtype, own=True)


def test_a_token_continues_a_scan(problems):
    given, _, _ = problem(problems, torch.float32, 60, 20)
    given |= {"D": None, "dt_bias": None}
    out, state = ssd_chunk_scan(**given, dt_softplus=True)
    short = {k: t[:, :-1] if k in ("x", "dt", "B", "C") else t for k, t in given.items()}
    if short["x"].shape[1]:
        _, before = ssd_chunk_scan(**short, dt_softplus=True)
        x, dt, A, B, C = (given[k] for k in ("x", "dt", "A", "B", "C"))
        shape = before.shape
        token = dt[:, -1, :, None].expand(shape[:3]), A[:, None, None].expand(shape[1:]), B[:, -1], C[:, -1]
        last, after = update.selective_state_update(before, x[:, -1], *token, dt_softplus=True)
        torch.testing.assert_close(last, out[:, -1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(after, state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 2, 0)])
def test_empty(shape):
    b, length, h, _ = shape
    given = torch.randn(shape), torch.randn(b, length, h), torch.randn(h), *(torch.randn(b, length, 1, 5),) * 2
    initial = torch.randn(b, h, shape[3], 5)
    out, states = ssd_chunk_scan(*given, initial_states=initial)
    assert out.shape == shape and (length or torch.equal(states, initial))
    dx, ddt, dA, *_ = ssd_chunk_scan_backward(out, None, *given)
    assert dx.shape == shape and ddt.shape == shape[:3] and (dA == 0).all()


def test_chunks_on_gpus():
    machine = Machine(Target("cuda", 90), 132)
    assert [config_for(torch.bfloat16, n, machine).chunk for n in (5, 700, 8192)] == [64, 128, 256]
    config = config_for(torch.bfloat16, 8192, machine)
    many = Work(64, 10**6)
    of_states = [config_of_states(config, torch.bfloat16, n, many, machine) for n in (64, 128)]
    assert [(c.state_tile, c.heads) for c in of_states] == [(64, 4), (128, 4)]
    assert config_of_states(config, torch.bfloat16, 128, Work(1, 10**6), machine).heads == 1
    assert config_of_states(config, torch.float32, 128, many, machine) is config
    spec = Spec(torch.bfloat16, vector=8)
    held = {n: config_of_scan(config, spec, 128, Work(n, 10**6), machine) for n in (1, 64)}
    assert [(c.heads, c.state_tile) for c in held.values()] == [(1, 64), (8, 128)]
    assert [(c.head_stages, c.stages, c.blocks) for c in held.values()][1] == (1, 4, 2)
    dots = config_of_scan(config, replace(spec, dots=True), 128, many, machine)
    assert (dots.heads, dots.stages, dots.blocks) == (8, 2, 4)  # no tiles of values
    assert config_of_scan(config, spec, 300, many, machine).heads == 1  # more states than a tile has
    assert config_of_scan(HELD, Spec(torch.float32), 33, many, machine).heads == 1
    assert config_of_scan(config, Spec(torch.bfloat16), 128, many, machine).heads == 1  # no bulk copies


def test_heads_of_a_block_leave_each_multiprocessor_two_blocks():
    machine = Machine(Target("cuda", 90), 132)
    for members, blocks in itertools.product((2, 7, 64), (1, 256, 512, 1024, 2048, 4096)):
        heads = heads_of(Work(members, blocks), machine)
        assert heads == 2 or blocks // heads >= 1.8 * machine.num_sms
        assert heads == 8 or blocks // (2 * heads) < 1.8 * machine.num_sms
    assert heads_of(Work(1, 4096), machine) == 1


@pytest.mark.parametrize(
    ("capability", "batch", "heads", "states", "whole"),
    [(90, 1, 64, 128, False), (90, 2, 64, 128, True), (90, 8, 64, 128, True), (90, 5, 32, 128, False),
     (90, 4, 32, 256, False), (80, 2, 64, 128, False)],
)  # fmt: skip
def test_one_kernel_has_the_forward_where_blocks_fill_waves(capability, batch, heads, states, whole):
    x = torch.empty(batch, 100, heads, 64, dtype=torch.bfloat16, device="meta")
    found = whole_config_for(x, states, Machine(Target("cuda", capability), 132))
    assert (found is not None) == whole


@pytest.mark.parametrize(
    ("capability", "batch", "heads", "states", "width", "reverse"),
    [(90, 1, 64, 128, 64, 64), (90, 2, 80, 128, 128, 64), (90, 8, 64, 128, 128, 64), (90, 4, 32, 256, 128, 64),
     (90, 8, 64, 64, 64, 64), (90, 1, 32, 128, None, None), (80, 8, 64, 128, None, None)],
)  # fmt: skip
def test_one_kernel_has_the_states_where_blocks_fill_the_gpu(capability, batch, heads, states, width, reverse):
    machine = Machine(Target("cuda", capability), 132)
    config, problem = config_for(torch.bfloat16, 8192, machine), Problem(batch, heads, 64, states)
    for backwards, columns in ((False, width), (True, reverse)):
        found = carry_config_for(config, Spec(torch.bfloat16, vector=8, reverse=backwards), problem, machine)
        assert (found and found.state_tile) == columns
    assert carry_config_for(config, Spec(torch.bfloat16), problem, machine) is None  # no bulk copies
    assert carry_config_for(config, Spec(torch.float32, vector=4), problem, machine) is None
