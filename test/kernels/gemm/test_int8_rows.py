# SPDX-License-Identifier: Apache-2.0
"""Products of few int8 rows with weights of fewer bits: bytes are exact, and results are those of float64."""

import itertools
from functools import partial

import pytest
import torch

from test.kernels.gemm.test_scaled import exact, packed
from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine, machine_of
from torch_tile.kernels.gemm import int8_rows
from torch_tile.kernels.gemm.args import ScaledGemmArgs
from torch_tile.kernels.gemm.int8_rows import COLUMNS, ColumnOrder, Fields, config_for, fits, footprint, order_rows
from torch_tile.kernels.gemm.scaled import prepare, scaled_gemm
from torch_tile.kernels.gemm.tiling import Config

HOPPER = Machine(Target("cuda", 90), 132)
I8, U8, F32, BF16 = torch.int8, torch.uint8, torch.float32, torch.bfloat16
ROWS, MATRIX, GROUPS = ("own", False), ("one", False), ("own", True)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("signed", [False, True])
def test_fields_become_bytes(bits, signed, problems):
    """Each byte is the number that a field stands for, times a power of two, for each offset that is allowed."""
    words = torch.randint(-(2**31), 2**31, (4000,), generator=problems.generator).to(torch.int32)
    for offset, number in itertools.product(range((1 << (bits - 1)) + 1), range(8 // bits)):
        fields = Fields(bits, signed, offset)
        found = fields.bytes_of(words, number).view(I8).to(torch.int32)
        code = (words.view(U8).to(torch.int32) >> bits * number) & ((1 << bits) - 1)
        if signed:
            code = (code ^ fields.half) - fields.half
        assert torch.equal(found, (code - offset) * fields.times), fields


ORDERS = (128, 4), (256, 2), (128, 2), (256, 1)


@pytest.mark.parametrize("slots", [ColumnOrder(width, bits) for width, bits in ORDERS])
def test_rows_are_ordered(slots, problems):
    """Each lane's words hold the columns of its slots, and columns behind the last are 0."""
    columns = torch.tensor([slots.column(slot) for slot in range(slots.width)])
    words = itertools.product(range(slots.width // slots.columns), range(slots.fields), range(4))
    assert all(slots.column(slots.slot(w, f, b)) == w * slots.columns + b * slots.fields + f for w, f, b in words)
    assert sorted(columns.tolist()) == [*range(slots.width)]
    per_word = 32 // slots.bits
    for slot, column in enumerate(columns.tolist()):
        assert slots.word(slot) == column // per_word
        assert slots.field(slot) == column % slots.fields and slot % 4 == column % per_word // slots.fields
    m, k = problems.size(9), 3 * slots.width - 16 * problems.size(6)
    a = problems.tensor(m, k, layout="dense").mul(40).to(I8)
    ordered = torch.full((m, 3 * slots.width), 77, dtype=I8)
    machine_of(a).kernel(order_rows)(slots, 1)(a, ordered)
    whole = torch.nn.functional.pad(a, (0, 3 * slots.width - k)).view(m, 3, slots.width)
    assert torch.equal(ordered.view(m, 3, -1), whole[..., columns])


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("words", [I8, U8])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("splits", [1, 2])
def test_random_problems(bits, words, splits, engine, problems, check):
    """Ragged sizes, each offset, scales of rows, of the matrix and of runs of columns."""
    form = problems.pick((ROWS, ROWS), (MATRIX, ROWS), (ROWS, MATRIX), (ROWS, GROUPS))
    columns, rows = problems.pick((8, 8), (16, 12), (24, 24))
    m, n, unit = problems.size(rows), 4 * problems.size(40), 128 // bits
    k = 512 * problems.pick(2, 3) if form[1] == GROUPS else unit * problems.size(2048 // unit)
    config = Config(columns, 64, 512, 128, 2, splits, cluster=splits > 1, transposed=True)
    offset = problems.pick(*range((1 << (bits - 1)) + 1))
    (a, b, scale_a, scale_b), numbers = packed(problems, form, m, n, k, bits, words)
    scale_b = scale_b.contiguous() if problems.pick(False, True) else scale_b.t().contiguous().t()
    args = a.contiguous(), b.t().contiguous().t(), scale_a, scale_b
    row = problems.tensor(n, dtype=F32)
    epilogue = "r", "v=add(acc0,x0);w=silu(v);ret w"
    got = scaled_gemm(*args, [row], *epilogue, F32, bits, offset, config=config)
    want = partial(exact, a, numbers - offset, *args[2:], [row], *epilogue)
    check(got, want, f"{m}x{n}x{k}, {form}, less {offset}, {config}", F32)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("words", [I8, U8])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_one_row(bits, words, engine, problems, check):
    """Odd numbers of rows of weights, last steps that are cut off, and blocks with several or no tiles."""
    form, unit = problems.pick((ROWS, ROWS), (MATRIX, ROWS), (ROWS, MATRIX)), 128 // bits
    n, k = problems.size(40), unit * problems.size(9000 // unit)
    rows, blocks, stages = problems.pick(64, 128), problems.pick(1, 2, 5), problems.pick(1, 2, 3)
    width = min(4 * int8_rows.LANE_BYTES * 8 // bits, int8_rows.LONGEST_RUN)
    resident = problems.pick(1, 2)
    config = Config(1, rows, width, 2 * rows, stages, 8, blocks=blocks, transposed=True, resident=resident)
    offset = problems.pick(*range((1 << (bits - 1)) + 1))
    (a, b, scale_a, scale_b), numbers = packed(problems, form, 1, n, k, bits, words)
    args = a.contiguous(), b.t().contiguous().t(), scale_a, scale_b
    row = problems.tensor(n, dtype=F32)
    epilogue = "r", "v=add(acc0,x0);w=silu(v);ret w"
    got = scaled_gemm(*args, [row], *epilogue, F32, bits, offset, config=config)
    want = partial(exact, a, numbers - offset, *args[2:], [row], *epilogue)
    check(got, want, f"{n}x{k}, {form}, less {offset}, {config}", F32)


def arguments(problems, k=1024, bits=2, scale_b=ROWS, **changes):
    args = {"m": 3, "n": 16, "scale_a": ROWS} | changes
    given, _ = packed(problems, (args["scale_a"], scale_b), args["m"], args["n"], k, bits, U8)
    a, b, of_a, of_b = given
    given = a.contiguous(), b.t().contiguous().t(), of_a, of_b.contiguous()
    return ScaledGemmArgs(*given, [], "", "", BF16, bits, 0)


def test_which_products_fit(problems):
    def fit(k=1024, **changes):
        args = arguments(problems, k, **changes)
        out = torch.empty(args.a.shape[0], args.b.shape[1], dtype=BF16)
        return fits(prepare(args, HOPPER, out)[0], k, HOPPER)

    assert fit() and fit(1024 + 64) and fit(scale_b=GROUPS) and fit(scale_a=MATRIX)
    assert not fit(1024 + 32) and not fit(scale_a=GROUPS) and not fit(scale_b=GROUPS, n=18) and not fit(1 << 17)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("scale_b", [ROWS, GROUPS])
def test_tilings_fit(bits, scale_b, problems):
    args = arguments(problems, bits=bits, scale_b=scale_b)
    spec = prepare(args, HOPPER, torch.empty(3, 16, dtype=BF16))[0]
    sizes = itertools.product((1, 9, 16, 33, 64), (64, 4096, 6144, 16384, 100_000), (512, 4096, 14336))
    for m, n, k in sizes:
        config = config_for(m, n, k, spec, HOPPER)
        assert config.transposed and config.stages >= 2
        if config.blocks:
            assert m == 1 and scale_b == ROWS
            held = int8_rows.runs_held(config, bits, k)
            assert config.resident * int8_rows.row_footprint(config, spec, held).bytes <= HOPPER.target.shared_limit
            continue
        assert config.block_m in COLUMNS and m <= config.block_m < m + 16
        assert config.splits == 1 or config.splits * int8_rows.LEAST_STEPS * config.block_k <= k
        assert config.resident * footprint(config, spec, True).bytes <= HOPPER.target.shared_limit
        assert config.block_k % int8_rows.column_order(spec).width == 0
    assert config_for(65, 4096, 4096, spec, HOPPER) is None
    blocks = [config_for(1, n, 4096, spec, HOPPER).resident for n in (4096, 28672)]
    assert scale_b == GROUPS or blocks == [2, 3 if bits == 4 else 4]
    assert scale_b == GROUPS or bool(config_for(1, 13824, 5120, spec, HOPPER).blocks) == (bits > 1)
