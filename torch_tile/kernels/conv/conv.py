# SPDX-License-Identifier: Apache-2.0
"""Convolutions over 1 to 3 dimensions with dense channels, as products: pixels by (taps x channels) by filters.

A block makes a box of rows and columns of one frame. For each tap it loads the box shifted by that tap, row by row.
What lies outside reads as 0, so that padding costs nothing. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

import torch_tile.language as T
from torch_tile.kernels.common import (
    KEPT_CHOICES,
    Machine,
    compute_dtype,
    dynamic,
    entry_function,
    machine_of,
    power_of_two,
    round_up,
    strided,
    typical,
    vector_of,
)
from torch_tile.kernels.conv.args import ConvArgs, result_dtype
from torch_tile.kernels.epilogue.program import evaluate, of_layer
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm.spec import Spec, finish, parameters
from torch_tile.kernels.library_jit import library_jit

TIME, HEIGHT, WIDTH = range(3)


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `activation(conv(x, weight) + bias) + residual` in float32 (float64 for float64), rounded once."""
    args: ConvArgs[torch.Tensor] = ConvArgs(*given, **named)
    return _in_torch(args, compute_dtype(args.x.dtype))


def differentiable(*given: Any, **named: Any) -> torch.Tensor:
    """Compute what `reference` does with the convolution in x's dtype, whose gradients are torch's own kernels."""
    args: ConvArgs[torch.Tensor] = ConvArgs(*given, **named)
    return _in_torch(args, args.x.dtype)


def _in_torch(args: ConvArgs[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Compute the convolution in plain torch, the products in `dtype`."""
    x, weight, bias, residual = args[:4]
    dims, wide = x.dim() - 2, compute_dtype(x.dtype)
    window = args.window(dims)
    ends = [n for pair in zip(reversed(window.before), reversed(window.after), strict=True) for n in pair]
    # Torch refuses or miscounts what has no channels or no filters, so that one of zeros stands in for none.
    channel, filters = [0, int(not x.shape[-1])], weight.shape[0]
    image = F.pad(x.movedim(-1, 1).to(dtype), [*ends, *channel])
    taps = F.pad(weight.movedim(-1, 1).to(dtype), [*[0] * len(ends), *channel, 0, int(not filters)])
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    product = function(image, taps, stride=window.stride, dilation=window.dilation)[:, :filters]
    aux = [t.to(wide) for t in (bias, residual) if t is not None]
    out = evaluate(_text(args), [product.movedim(1, -1).to(wide)], aux)
    return out.to(result_dtype(x.dtype, None if residual is None else residual.dtype)).contiguous()


def _text(args: ConvArgs[torch.Tensor]) -> str:
    """Return the epilogue of a convolution."""
    return of_layer(args.activation, args.bias is not None, args.residual is not None)


@dataclass(frozen=True)
class Config:
    """The tiling of a convolution: one block makes `rows x columns` pixels of `block_n` filters.

    It sums over `block_k` channels of a tap at a time. With `blocks` so many blocks take one box after the other, else
    there is one for each box. `staged` sends results through shared memory.
    """

    rows: int = 1
    columns: int = 128
    block_n: int = 64
    block_k: int = 32
    threads: int = 128
    stages: int = 3
    staged: bool = False
    blocks: int = 0

    @property
    def pixels(self) -> int:
        """Return the number of pixels in a box."""
        return self.rows * self.columns

    @property
    def each_row(self) -> tuple[int, ...]:
        """Return the numbers of a box's rows."""
        return tuple(range(self.rows))

    @property
    def width(self) -> int:
        """Return how many filters a panel of staged results has, of 16 bits each.

        Blocks of one box send all at once: panels would cut the filters of a warp, and their tiles are free by then.
        """
        if not self.blocks:
            return self.block_n
        return math.gcd(64 if self.pixels <= 128 else 32 if self.pixels <= 256 else 16, self.block_n)


@dataclass(frozen=True)
class ConvSpec:
    """Compile-time facts of a convolution besides its `Config`: the window over time, rows and columns, and `product`.

    Columns of x are grouped by the stride, so that a step over them is one over groups. Filters are a multiple of
    `vector`, if rows of the result start at multiples of 16 bytes.
    """

    taps: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    dilation: tuple[int, ...]
    product: Spec
    vector: int = 1

    def rows_at(self, dim: int, place: Any, tap: Any) -> Any:
        """Return where tap `tap` of the pixel at `place` reads in time or along rows."""
        return place * self.stride[dim] + tap * self.dilation[dim] - self.before[dim]

    def group_at(self, tap: Any) -> tuple[Any, Any]:
        """Return by how many groups of columns a tap is shifted, and which column of the group it reads."""
        step, before, dilation = self.stride[WIDTH], self.before[WIDTH], self.dilation[WIDTH]
        if step == 1:
            return tap * dilation - before, 0
        whole = round_up(before, step)  # so that the quotient is that of numbers from 0
        shifted = tap * dilation - before + whole
        return shifted // step - whole // step, shifted % step


@T.macro
def multiply(config: Config, spec: ConvSpec, x: Any, weight: Any, place: Any, col: Any) -> Any:
    """Compute the products of a box of pixels and the filters from `col` on."""
    image, frame, top, left = place
    bw, bn, bk = config.columns, config.block_n, config.block_k
    a_tile = T.alloc_shared((config.pixels, bk), spec.product.dtype)
    b_tile = T.alloc_shared((bn, bk), spec.product.dtype)
    product = T.alloc_fragment((config.pixels, bn), compute_dtype(spec.product.dtype))
    T.clear(product)
    _, high, wide = spec.taps
    channels = weight.shape[2]
    chunks = T.ceildiv(channels, bk)
    for step in T.Pipelined(math.prod(spec.taps) * chunks, num_stages=config.stages):
        tap, c = step // chunks, step % chunks * bk
        t = spec.rows_at(TIME, frame, tap // (high * wide))
        shift, phase = spec.group_at(tap % wide)
        w, column = left + shift, phase * channels + c
        for row in config.each_row:
            h = spec.rows_at(HEIGHT, top + row, tap // wide % high)
            T.copy(x[image, t, h, w : w + bw, column : column + bk], a_tile[row * bw : (row + 1) * bw, :])
        T.copy(weight[col : col + bn, tap, c : c + bk], b_tile)
        T.gemm(a_tile, b_tile, product, transpose_B=True)
    return product


@T.macro
def make_box(config: Config, spec: ConvSpec, number: Any, x: Any, weight: Any, aux: Any, staged: Any, out: Any) -> None:
    """Make box number `number` of the result; boxes of the same pixels follow each other."""
    bw, bn, width = config.columns, config.block_n, config.width
    _, frames, height, columns, filters = out.shape
    across, down, beside = T.ceildiv(columns, bw), T.ceildiv(height, config.rows), T.ceildiv(filters, bn)
    col, box = number % beside * bn, number // beside
    left, top = box % across * bw, box // across % down * config.rows
    frame, image = box // (across * down) % frames, box // (across * down) // frames
    product = multiply(config, spec, x, weight, (image, frame, top, left), col)
    first = (image * frames + frame) * height + top
    if config.staged:
        for panel, buffer in panels(config):
            result = T.alloc_fragment((config.pixels, width), spec.product.out_dtype)
            for i, j in T.Parallel(config.pixels, width):
                pixel = (first + i // bw) * columns + left + i % bw
                result[i, j] = finish(spec.product, [product[i, panel + j]], aux, 0, pixel, col + panel + j)
            T.copy(result, staged[buffer])
            start = col + panel
            for row in config.each_row:
                T.copy(
                    staged[buffer][row * bw : (row + 1) * bw, :],
                    out[image, frame, top + row, left : left + bw, start : start + width],
                )
    else:
        for i, j in T.Parallel(config.pixels, bn):
            pixel = (first + i // bw) * columns + left + i % bw
            value = finish(spec.product, [product[i, j]], aux, 0, pixel, col + j)
            out[image, frame, top + i // bw, left + i % bw, col + j] = value


def panels(config: Config) -> list[tuple[int, int]]:
    """Return the first filter of each panel, and which of two buffers it uses."""
    return [(start, start // config.width % 2) for start in range(0, config.block_n, config.width)]


@library_jit
def convolution(config: Config, spec: ConvSpec) -> Any:
    """Build the kernel `out = epilogue(conv(x, weight), aux)` over time, rows and columns."""
    product, step = spec.product, spec.stride[WIDTH]
    images, times, rows, groups = T.dynamic("images, times, rows, groups")
    frames, height, columns, pixels = T.dynamic("frames, height, columns, pixels")
    filters, channels = dynamic("filters", spec.vector), dynamic("channels", product.vector)
    x_type = strided("x", (images, times, rows, groups, step * channels), product.dtype, multiple=product.vector)
    w_type = strided("w", (filters, math.prod(spec.taps), channels), product.dtype, multiple=product.vector)
    _, _, aux_types = product.operand_types(1, pixels, filters, channels)
    out_type = T.Tensor((images, frames, height, columns, filters), product.out_dtype)

    @T.prim_func
    def conv(x: x_type, weight: w_type, *aux: aux_types, out: out_type):
        boxes = T.ceildiv(columns, config.columns) * T.ceildiv(height, config.rows) * frames * images
        count = boxes * T.ceildiv(filters, config.block_n)
        with T.Kernel(config.blocks if config.blocks else count, threads=config.threads) as block:
            shape = config.pixels, config.width
            staged = [T.alloc_shared(shape, product.out_dtype) for _ in panels(config)[:2] if config.staged]
            if config.blocks:
                for iteration in T.serial(T.ceildiv(count - block, config.blocks)):
                    make_box(config, spec, block + iteration * config.blocks, x, weight, aux, staged, out)
            else:
                make_box(config, spec, block, x, weight, aux, staged, out)

    return conv


@dataclass(frozen=True)
class Problem:
    """A convolution to be tiled: its result's frames and sizes, filters, channels, and facts about memory.

    `aligned` says that pixels of x start at multiples of 16 bytes. `whole` that steps must divide the channels.
    `residual` that one is added.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    frames: int
    height: int
    columns: int
    filters: int
    channels: int
    aligned: bool = False
    whole: bool = False
    residual: bool = False


COLUMNS = (128, 64, 32, 16, 8)  # of a box
MOST_COPIES = 16  # of rows of a box times warpgroups: a thread has fewer registers for their addresses then
# Channels of a step on GPUs, of 16 bits, and how fast they multiply (H200: 192 channels of 192 filters, 360 x 640).
STEPS = {64: 1.0, 32: 0.8, 16: 0.45}
# Pixels, filters and warpgroups of tiles by wgmma.
HOPPER_TILES = (
    (192, 192, 3), (128, 192, 2), (256, 128, 2), (128, 128, 2), (384, 96, 3), (128, 96, 2),
    *((pixels, filters, 2) for pixels in (256, 128) for filters in (64, 32, 16, 8)),
)  # fmt: skip
EDGE = 40  # pixels or filters whose products take as long as to bring operands for one more column or row
STAGES = 8


def footprint(config: Config, problem: Problem, bulk: bool) -> Footprint:
    """Compute the shared memory of the tiles of pixels and filters, and of staged results."""
    bits, out = 8 * problem.dtype.itemsize, 8 * problem.out_dtype.itemsize
    tiles = [Tile(n, config.block_k, bits, config.stages, (Part.LOOP,)) for n in (config.pixels, config.block_n)]
    if config.staged:
        tiles += [Tile(config.pixels, config.width, out, parts=(Part.LEAVING,))] * len(panels(config)[:2])
    return Footprint(tuple(tiles), bulk)


def box_of(problem: Problem, pixels: int, groups: int = 2) -> tuple[int, int]:
    """Return the rows and columns of a box of so many pixels that covers an image with the fewest boxes."""

    def boxes(columns: int) -> int:
        return -(-problem.columns // columns) * -(-problem.height // (pixels // columns))

    fitting = (n for n in COLUMNS if pixels % n == 0 and pixels // n * groups <= MOST_COPIES)
    columns = min(fitting, key=boxes)
    return pixels // columns, columns


def step_of(problem: Problem) -> int:
    """Return how many channels to sum at a time, which is fast and has few past the last."""
    fitting = [n for n in STEPS if not problem.whole or problem.channels % n == 0]
    return min(fitting, key=lambda n: -(-problem.channels // n) * n / STEPS[n])


def config_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a convolution on a machine. Return None if even the smallest does not fit."""
    return _config_for(typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _config_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of sizes that are known."""
    narrow, size = power_of_two(problem.filters), problem.dtype.itemsize
    if not machine.is_gpu or size > 2:
        rows, columns = box_of(problem, 64)
        step = 16 if machine.is_gpu or problem.whole else min(64, power_of_two(problem.channels))
        return Config(rows, columns, max(16, min(64, narrow)), step, 128, 2)
    if machine.target.has_wgmma and problem.aligned:
        return _hopper_config(problem, machine)
    rows, columns = box_of(problem, 128)
    filters = min((128, 96, 64, 32, 16), key=lambda n: -(-problem.filters // n) * (n + EDGE))
    config = Config(rows, columns, filters, step_of(problem), 256 if filters > 64 else 128, 4, staged=True)
    return _with_stages(config, problem, machine, False)


def _hopper_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling by wgmma, of boxes that bulk copies bring."""
    found = []
    for pixels, filters, groups in HOPPER_TILES:
        rows, columns = box_of(problem, pixels, groups)
        config = Config(rows, columns, filters, step_of(problem), 128 * groups, STAGES, True, machine.num_sms)
        fitted = _with_stages(config, problem, machine, True)
        crowded = problem.residual and pixels > 256  # registers would spill
        if fitted is not None and fitted.stages > 1 and not crowded:
            found.append(fitted)
    return min(found, key=lambda c: _duration(c, problem, machine.num_sms), default=None)


def _duration(config: Config, problem: Problem, num_sms: int) -> int:
    """Estimate the time of all waves, in products of one pixel and filter on a full SM."""
    boxes = problem.frames * -(-problem.height // config.rows) * -(-problem.columns // config.columns)
    waves = -(-boxes * -(-problem.filters // config.block_n) // num_sms)
    return waves * (config.pixels + EDGE) * (config.block_n + EDGE)


def _with_stages(config: Config, problem: Problem, machine: Machine, bulk: bool) -> Config | None:
    """Limit the stages to those that fit in shared memory. Return None if not even one fits."""
    stages = most_stages(
        lambda n: footprint(replace(config, stages=n), problem, bulk), range(config.stages, 0, -1), machine.target
    )
    return replace(config, stages=stages) if stages else None


def _empty_result(args: ConvArgs[torch.Tensor]) -> torch.Tensor:
    """Allocate the result of a convolution."""
    x, weight, residual = args.x, args.weight, args.residual
    sizes = args.window(x.dim() - 2).sizes(x.shape[1:-1], weight.shape[1:-1])
    dtype = result_dtype(x.dtype, None if residual is None else residual.dtype)
    return x.new_empty((x.shape[0], *sizes, weight.shape[0]), dtype=dtype)


@entry_function(ConvArgs, reference, _empty_result)
def conv(args: ConvArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the convolution as `reference` does. `config` overrides the choice of `config_for`."""
    if not args.weight.numel():
        return False
    if out.numel():
        _run(args, out, config)
    return True


def _run(args: ConvArgs[torch.Tensor], whole: torch.Tensor, config: Config | None) -> None:
    """Launch `conv` into `whole`, which must be contiguous and not empty."""
    machine, out = machine_of(args.x), whole
    x, weight, out = (_in_three(t) for t in (args.x, args.weight, out))
    missing = 5 - args.x.dim()
    stride, before, _, dilation = args.window(3 - missing)
    (stride, dilation), before = ((*(1,) * missing, *each) for each in (stride, dilation)), (*(0,) * missing, *before)
    taps, step = tuple(weight.shape[1:4]), stride[WIDTH]
    unit = 1 if not machine.is_gpu else 16 if step > 1 else max(1, 16 // x.element_size())
    x, weight = _regular(x, step, unit), _with_channels(weight, round_up(weight.shape[4], unit))
    weight = weight.contiguous().flatten(1, 3)
    if taps[HEIGHT:] == (1, 1) and stride[HEIGHT:] == (1, 1) and x.shape[2:4] == out.shape[2:4] and _flattens(x):
        x, out = (t.flatten(2, 3).unsqueeze(2) for t in (x, out))  # rows may follow each other
    x = x.unflatten(3, (-1, step)).flatten(4, 5)
    rows = None if args.residual is None else args.residual.reshape(-1, weight.shape[0])
    given = [t for t in (args.bias, rows) if t is not None]
    kinds = ("" if args.bias is None else "r") + ("" if rows is None else "t")
    aux, specs = parameters(given, kinds, machine.is_gpu)
    channels, filters = weight.shape[2], out.shape[4]
    vector = vector_of((x, weight), (channels,)) if machine.is_gpu else 1
    product = Spec(x.dtype, out.dtype, False, (True,), specs, _text(args), vector)
    spec = ConvSpec(taps, stride, before, dilation, product, vector_of((out,), (filters,)) if machine.is_gpu else 1)
    frames, (height, columns) = out.shape[0] * out.shape[1], out.shape[2:4]
    problem = Problem(x.dtype, out.dtype, frames, height, columns, filters, channels, vector > 1, step > 1)
    problem = replace(problem, residual=rows is not None)
    config = config or config_for(problem, machine)
    if config is None:
        whole.copy_(reference(*args))
        return
    machine.kernel(convolution)(config, spec)(x, weight, *aux, out)


def _in_three(x: torch.Tensor) -> torch.Tensor:
    """View `[N, *sizes, C]` with three sizes, those in front being 1."""
    return x.reshape((x.shape[0], *(1,) * (5 - x.dim()), *x.shape[1:])) if x.dim() < 5 else x


def _flattens(x: torch.Tensor) -> bool:
    """Return whether rows and columns of `[N, T, H, W, C]` can be viewed as one dimension."""
    return bool(x.shape[2] == 1 or x.stride(2) == x.shape[3] * x.stride(3))


def _regular(x: torch.Tensor, step: int, unit: int) -> torch.Tensor:
    """Return `x` with dense channels, a multiple of `unit`, and whole groups of `step` columns, else a padded copy."""
    columns, channels = round_up(x.shape[3], step), round_up(x.shape[4], unit)
    if (columns, channels) != tuple(x.shape[3:]):
        x = F.pad(x, (0, channels - x.shape[4], 0, columns - x.shape[3]))
    dense = x.stride(4) == 1 and (step == 1 or x.stride(3) == channels)
    aligned = unit == 1 or vector_of((x,), ()) > 1
    return x if dense and aligned else x.contiguous()


def _with_channels(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Return `x` with zeros behind its last channels."""
    return x if x.shape[-1] == channels else F.pad(x, (0, channels - x.shape[-1]))
