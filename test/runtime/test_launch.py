# SPDX-License-Identifier: Apache-2.0
import random
import threading

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError


def compiled(function, **options):
    return torch_tile.compile(function, **options)


@pytest.fixture(scope="module")
def add():
    """out = x + y * scale, row by row; the width is fixed, the height is not."""
    m = T.dynamic("m")

    @T.prim_func
    def add(x: T.Tensor((m, 6), "float32"), y: T.Tensor((m, 6), "float32"), scale: T.float32,
            out: T.Tensor((m, 6), "float32")):  # fmt: skip
        with T.Kernel(T.ceildiv(m, 4)) as b:
            for i, j in T.Parallel(4, 6):
                out[b * 4 + i, j] = x[b * 4 + i, j] + y[b * 4 + i, j] * scale

    return compiled(add)


@pytest.fixture
def tensors(seed):
    torch.manual_seed(seed)
    return torch.randn(5, 6), torch.randn(5, 6), 0.5, torch.empty(5, 6)


def test_runs(add, tensors):
    x, y, scale, out = tensors
    assert add(*tensors) is None
    torch.testing.assert_close(out, x + y * scale)


BAD = {
    "count": (lambda x, y, s, out: (x, y, s), r"add takes 4 arguments \(x, y, scale, out\), got 3"),
    "type": (lambda x, y, s, out: (x, y.numpy(), s, out), "argument `y` must be a tensor, got a numpy.ndarray"),
    "none": (lambda x, y, s, out: (None, y, s, out), "argument `x` must be a tensor, got NoneType"),
    "dtype": (lambda x, y, s, out: (x.double(), y, s, out), "`x` must have dtype torch.float32, got torch.float64"),
    "rank": (lambda x, y, s, out: (x[0], y, s, out), r"`x` must have 2 dimensions, got shape \[6\]"),
    "device": (lambda x, y, s, out: (x.to("meta"), y, s, out), "`x` must be on cpu, got a tensor on meta"),
    "strides": (lambda x, y, s, out: (x.T.contiguous().T, y, s, out), r"`x` must be contiguous, got strides \(1, 5\)"),
    "sparse": (lambda x, y, s, out: (x.to_sparse(), y, s, out), "`x` must be a plain dense tensor"),
    "negative": (
        lambda x, y, s, out: (torch._neg_view(x), y, s, out),
        r"`x` must be a plain dense tensor.*resolve_neg",
    ),
    "constant": (lambda x, y, s, out: (x[:, :5].clone(), y, s, out), "`x` must have size 6 in dimension 1, got 5"),
    "dimension": (lambda x, y, s, out: (x, y[:3], s, out), r"`y` must have size 5 \(m\) in dimension 0, got 3"),
    "no memory": (lambda x, y, s, out: (x, torch._efficientzerotensor(5, 6), s, out), "`y` has no memory"),
    "scalar": (lambda x, y, s, out: (x, y, "1", out), "`scale` must be a number of type float32, got str"),
    "no scalar": (
        lambda x, y, s, out: (x, y, torch.ones(2), out),
        "`scale` must be a number of type float32, got Tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, add, tensors):
    change, message = BAD[case]
    tensors[3].fill_(7)
    with pytest.raises(LaunchError, match=message):
        add(*change(*tensors))
    assert (tensors[3] == 7).all()


def test_scalars():
    names = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
             "float32", "float64"]  # fmt: skip

    def one(name):
        kind = getattr(T, name)

        @T.prim_func
        def keep(value: kind, out: T.Tensor((1,), name)):
            with T.Kernel(1) as _:
                out[0] = value

        return compiled(keep)

    for name in names:
        to, keep = getattr(torch, name), one(name)
        if name.startswith(("int", "uint")):
            info = torch.iinfo(to)
            values, bad = [info.min, info.max, True, torch.tensor(3)], [info.min - 1, info.max + 1, 1.0]
        elif name == "bool":
            values, bad = [True, False, 1], [2, -1, 0.5]
        else:
            values, bad = [1, -0.1, float("inf"), torch.tensor(0.3), torch.tensor(0.7).numpy()], [1j]
        for value in values:
            out = torch.zeros(1, dtype=to)
            keep(value, out)
            number = value.item() if hasattr(value, "item") else value
            assert out.item() == torch.tensor(number, dtype=to).item(), (name, value)
        for value in bad:
            with pytest.raises(LaunchError, match="`value`"):
                keep(value, torch.zeros(1, dtype=to))


def test_empty_tensors(add):
    add(torch.empty(0, 6), torch.empty(0, 6), 1.0, torch.empty(0, 6))


def test_dimensions_of_size_zero_are_guarded():
    """A block that runs although a dimension is empty reads 0 and writes nothing."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def first(x: T.Tensor((m, n), "float32"), y: T.Tensor((n,), "float32"), out: T.Tensor((m,), "float32")):
        with T.Kernel(m) as b:
            y[0] = 1.0
            out[b] = x[b, 0] + 5.0
            for j in T.serial(n):
                out[b] += x[b, j]

    kernel = compiled(first)
    out = torch.zeros(3)
    kernel(torch.empty(3, 0), torch.empty(0), out)
    assert (out == 5).all()
    kernel(torch.ones(3, 2), torch.empty(2), out)
    assert (out == 8).all()


def test_views(add, tensors):
    """Storage offsets, single rows with odd strides, one tensor twice, tensors that require a gradient, cpu:0."""
    x, y, scale, out = tensors
    wanted = x + y * scale
    big = torch.zeros(9, 6)
    with torch.no_grad():
        add(torch.cat([y, x])[5:], y.requires_grad_(), scale, big[3:8])
    torch.testing.assert_close(big[3:8], wanted)
    assert not big[:3].any() and not big[8:].any() and not big.requires_grad
    add(x, x, 2.0, out.to("cpu:0"))
    add(x, x, 2.0, x)
    torch.testing.assert_close(x, tensors[0])
    row = torch.randn(6).as_strided((1, 6), (77, 1))
    out = torch.empty(1, 6)
    add(row, row, 1.0, out)
    torch.testing.assert_close(out, row * 2)


def test_in_place_is_seen(add):
    x = torch.ones(4, 6)
    add(x, x, 2.0, x)
    assert (x == 3).all()


@pytest.fixture(scope="module")
def strided():
    m, n, s, t = T.dynamic("m, n, s, t")

    @T.prim_func
    def move(x: T.StridedTensor((m, n), (s, t), "int32"), y: T.StridedTensor((n, m), (t, 1), "int32"),
             out: T.Tensor((m, n), "int32")):  # fmt: skip
        with T.Kernel(m) as b:
            for j in T.Parallel(n):
                out[b, j] = x[b, j] - y[j, b]

    return compiled(move)


def test_strides(strided):
    base = torch.arange(200, dtype=torch.int32).reshape(10, 20)
    x, y = base[1:4, 2:12:2], torch.randint(0, 9, (5, 3), dtype=torch.int32)
    grown = torch.zeros(11, dtype=torch.int32).as_strided((5, 3), (2, 1))
    out = torch.empty(3, 5, dtype=torch.int32)
    strided(x, grown, out)
    assert torch.equal(out, x - grown.T)
    with pytest.raises(LaunchError, match=r"`y` must have stride 2 \(t\) in dimension 0, got 3"):
        strided(x, y, out)
    with pytest.raises(LaunchError, match=r"`y` must have stride 1 in dimension 1, got 5"):
        strided(x, torch.zeros(19, dtype=torch.int32).as_strided((5, 3), (2, 5)), out)


def test_stride_of_a_single_row_contradicts_nothing(strided):
    """`t` is the stride of single columns of x; y tells it."""
    x = torch.ones(3, 1, dtype=torch.int32).as_strided((3, 1), (1, 99))
    out = torch.empty(3, 1, dtype=torch.int32)
    strided(x, torch.zeros(1, 3, dtype=torch.int32).as_strided((1, 3), (50, 1)), out)
    assert (out == 1).all()


def test_strides_past_32_bits():
    """An expanded tensor spans more elements than an int32 can count; the index is computed in 64 bits."""
    m, s = T.dynamic("m, s")

    @T.prim_func
    def gather(x: T.StridedTensor((m, 70000), (s, 1), "int32"), at: T.Tensor((2,), "int32"),
               out: T.Tensor((4,), "int32")):  # fmt: skip
        with T.Kernel(1) as _:
            row = T.alloc_var("int32", 0)
            row = at[0]
            out[0] = x[row, at[1]]
            out[1] = x[at[0] * 2, at[1]]
            out[2] = T.if_then_else(at[0] * 70000 + at[1] < m * 70000, 1, 0)
            out[3] = x[at[0] * at[0], at[1]]  # far outside

    x = torch.arange(70000, dtype=torch.int32).expand(200000, 70000)
    out = torch.zeros(4, dtype=torch.int32)
    kernel = compiled(gather)
    kernel(x, torch.tensor([99999, 69999], dtype=torch.int32), out)
    assert out.tolist() == [69999, 69999, 1, 0]


@pytest.mark.parametrize("out_idx", [-1, 2, [1, 2], [2, 1], [-1, -2]])
def test_out_idx(out_idx):
    m = T.dynamic("m")

    @T.prim_func
    def two(x: T.Tensor((m, 4), "float32"), double: T.Tensor((m, 4), "float32"), total: T.Tensor((m,), "float16")):
        with T.Kernel(m) as b:
            for j in T.Parallel(4):
                double[b, j] = x[b, j] * 2.0
            total[b] = x[b, 0] + x[b, 1]

    x = torch.randn(3, 4)
    kernel = compiled(two, out_idx=out_idx)
    given = [torch.empty(3, 4)] if isinstance(out_idx, int) else []
    got = kernel(x, *given)
    wanted = {1: x * 2, 2: (x[:, 0] + x[:, 1]).half()}
    positions = [i % 3 for i in ([out_idx] if isinstance(out_idx, int) else out_idx)]
    assert kernel.out_idx == positions
    for one, position in zip([got] if isinstance(out_idx, int) else got, positions, strict=True):
        torch.testing.assert_close(one, wanted[position])


def test_sizes_that_do_not_follow():
    m = T.dynamic("m")

    @T.prim_func
    def grow(x: T.Tensor((m * 2,), "float32")):
        with T.Kernel(m) as b:
            x[b] = 1.0

    x = torch.zeros(4)
    compiled(grow)(x)
    assert x.tolist() == [1, 1, 0, 0]
    with pytest.raises(LaunchError, match=r"`x` has size 5 in dimension 0, from which m of m \* 2 does not follow"):
        compiled(grow)(torch.zeros(5))

    @T.prim_func
    def fill(x: T.Tensor((4,), "float32"), y: T.Tensor((m + 1,), "float32")):
        with T.Kernel(1) as _:
            T.fill(y, x[0])

    with pytest.raises(LaunchError, match="size `m` does not follow from the shapes and strides of \\['x'\\]"):
        compiled(fill, out_idx=1)(torch.zeros(4))


def test_sizes_that_must_fit():
    m, n = T.dynamic("m, n")

    @T.prim_func
    def halves(x: T.Tensor((m, n), "float32"), y: T.Tensor((n // 2, T.max(m, 2) % 5), "float32")):
        with T.Kernel(1) as _:
            T.clear(y)

    kernel = compiled(halves)
    kernel(torch.empty(3, 9), torch.empty(4, 3))
    kernel(torch.empty(7, 9), torch.empty(4, 2))
    with pytest.raises(LaunchError, match=r"`y` must have size 4 \(n // 2\) in dimension 0, got 5"):
        kernel(torch.empty(3, 9), torch.empty(5, 3))


def test_device_assertion_names_the_line():
    @T.prim_func
    def check(limit: T.int32, out: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            assert b >= 0, "never"
            for i in T.Parallel(4):
                T.device_assert(b + i < limit, "too large")
            out[b] = 1

    kernel = compiled(check)
    out = torch.zeros(4, dtype=torch.int32)
    kernel(7, out)
    assert out.tolist() == [1, 1, 1, 1]
    with pytest.raises(TileError, match="device assertion failed: too large") as caught:
        kernel(6, out)
    assert caught.value.code == "device_assert"
    assert "T.device_assert(b + i < limit" in caught.value.span.source()


def test_print(capfd):
    @T.prim_func
    def show(x: T.Tensor((2, 2), "float16"), n: T.int64):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((2,), "int8")
            for i in T.Parallel(2):
                tile[i] = -i
            T.print(x[0, 1], msg='100% "quoted"\n\\')
            T.print(n * 2)
            T.print(tile, msg="tile")
            T.print(n > 3, msg="é")
            T.print(msg="100% alone\\")

    compiled(show)(torch.tensor([[1, 2.5], [3, 4]]).half(), 2**40)
    lines = capfd.readouterr().out.splitlines()
    assert lines == ['100% "quoted"', "\\: 2.5", str(2**41), "tile tile: 0", "tile tile: -1", "é: 1", "100% alone\\"]


def test_two_threads(add, seed):
    """Launches share nothing."""
    failed = []

    def work(number):
        generator = torch.Generator().manual_seed(seed + number)
        for _ in range(100):
            m = random.randint(1, 40)
            x, y, out = torch.randn(m, 6, generator=generator), torch.ones(m, 6), torch.empty(m, 6)
            add(x, y, float(number), out)
            if not torch.equal(out, x + number):
                failed.append(m)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def test_author_names_may_be_anything():
    """Names of the generated code's own variables, of C++ and of the headers."""

    @T.prim_func
    def names(blocks: T.Tensor((8,), "int32"), free: T.Tensor((8,), "int32"), code: T.int32, buffers: T.float32,
              block_0: T.Tensor((8,), "float32"), grid_x: T.int8):  # fmt: skip
        with T.Kernel(8) as block:
            arena = T.alloc_shared((5000,), "float32")
            typename = block + code
            T.fill(arena, buffers)
            numbers = T.alloc_var("int32", typename)
            blocks[block] = numbers + free[block]
            größe = arena[4999]
            block_0[block] = größe + grid_x

    blocks, free, other = torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32), torch.zeros(8)
    compiled(names)(blocks, free, 10, 0.25, other, -3)
    assert torch.equal(blocks, 2 * free + 10) and (other == -2.75).all()
