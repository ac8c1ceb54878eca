# SPDX-License-Identifier: Apache-2.0
"""Copies by tensor map on a GPU, byte for byte: swizzles, ranks, edges, strides, types. Kernels are CUDA by hand."""

import itertools
import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.sources import CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const, to_expr
from torch_tile.runtime import cuda_launch
from torch_tile.runtime.cuda_launch import CudaLauncher, current_stream
from torch_tile.runtime.driver import driver
from torch_tile.runtime.native_launch import native
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.runtime.tensor_map import TensorMaps, map_form

pytestmark = pytest.mark.cuda
HOPPER = Target("cuda", 90)
SHARED = 1024 + 64 * 1024  # a barrier, and the box at a multiple of 1024
COMBINE = ("add", "min", "max")
MASKS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}

HEAD = """
struct alignas(64) Map { unsigned long long words[16]; };
#define BOX_AND_BARRIER                                       \\
  extern __shared__ __align__(1024) unsigned char memory[];   \\
  unsigned barrier = (unsigned)__cvta_generic_to_shared(memory), box = barrier + 1024;
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ void wait(unsigned barrier) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again;}"
               :: "r"(barrier) : "memory");
}
__device__ void stored() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#define LOAD(rank) "cp.async.bulk.tensor." rank "d.shared::cluster.global.mbarrier::complete_tx::bytes "
#define STORE(rank) "cp.async.bulk.tensor." rank "d.global.shared::cta.bulk_group "
#define REDUCE(rank, how) "cp.reduce.async.bulk.tensor." rank "d.global.shared::cta." how ".bulk_group "
#define PLACE int c0, int c1, int c2, int c3, int c4  // innermost first
"""
# Shared memory is full of 255 before.
ONE_LOAD = """
extern "C" __global__ void __launch_bounds__(128)
load_{rank}(const __grid_constant__ Map map, unsigned char* out, int bytes, PLACE) {{
  BOX_AND_BARRIER
  for (int i = threadIdx.x; i < bytes; i += 128) memory[1024 + i] = 255;
  fence();
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(barrier, bytes);
    asm volatile(LOAD("{rank}") "[%0], [%1, {{{places}}}], [%2];"
                 :: "r"(box), "l"(&map), "r"(barrier), {given} : "memory");
  }}
  __syncthreads();
  wait(barrier);
  for (int i = threadIdx.x; i < bytes; i += 128) out[i] = memory[1024 + i];
}}
"""
ONE_STORE = """
extern "C" __global__ void __launch_bounds__(128)
{name}_{rank}(const __grid_constant__ Map map, const unsigned char* in, int bytes, PLACE) {{
  BOX_AND_BARRIER
  for (int i = threadIdx.x; i < bytes; i += 128) memory[1024 + i] = in[i];
  fence();
  __syncthreads();
  if (threadIdx.x == 0) {{
    asm volatile({operation} "[%0, {{{places}}}], [%1];" :: "l"(&map), "r"(box), {given} : "memory");
    stored();
  }}
}}
"""


def text():
    """Loads, stores and reductions of every rank."""
    parts = [HEAD]
    for rank in range(1, 6):
        given = ", ".join(f'"r"(c{d})' for d in range(rank))
        load, store = (", ".join(f"%{first + d}" for d in range(rank)) for first in (3, 2))
        parts.append(ONE_LOAD.format(rank=rank, places=load, given=given))
        for name in ("store", *COMBINE):
            operation = f'STORE("{rank}")' if name == "store" else f'REDUCE("{rank}", "{name}")'
            parts.append(ONE_STORE.format(name=name, rank=rank, operation=operation, places=store, given=given))
    return "".join(parts)


@pytest.fixture(scope="module")
def functions():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    names = [f"{name}_{rank}" for name in ("load", "store", *COMBINE) for rank in range(1, 6)]
    torch.zeros(1, device="cuda")
    return driver().load(compile_cubin(text(), HOPPER).data, 0, dict.fromkeys(names, SHARED))


def maps_of(tensor, box, swizzle, dtype=None):
    """The maps of a tensor's form; box and sizes outermost first."""
    name = str(dtype or tensor.dtype).removeprefix("torch.")
    sizes, strides = (tuple(map(to_expr, each)) for each in (tensor.shape, tensor.stride()))
    return TensorMaps(map_form(MapArg(0, sizes, strides, box, swizzle, name, tensor.itemsize), "x", {}), driver())


def run(function, maps, tensor, raw, place):
    """One block; `place` outermost first, `raw` the bytes of the box in shared memory."""
    coordinates = [n % 2**64 for n in (*reversed(place), *[0] * (5 - len(place)))]
    slots = [maps.at(tensor.data_ptr()), raw.data_ptr(), raw.numel(), *coordinates]
    machine = driver()
    with machine.current(function.context):
        machine.launch(function.handle, (1, 1, 1), 128, SHARED, current_stream(0), slots)
    torch.cuda.synchronize()


def swizzled(count, swizzle):
    """Where each byte of a box lies: 16-byte chunks of a row change places with the row's number."""
    at = torch.arange(count, device="cuda")
    return at ^ ((at >> 3) & MASKS[swizzle])


def inside(shape, box, place):
    """The part of a box that is in a tensor: slices of the tensor, and of the box."""
    starts = [max(0, p) for p in place]
    stops = [max(s, min(n, p + b)) for s, n, p, b in zip(starts, shape, place, box, strict=True)]
    here = tuple(map(slice, starts, stops))
    return here, tuple(slice(s - p, e - p) for s, e, p in zip(starts, stops, place, strict=True))


def random_bytes(shape, dtype):
    """Any bit patterns; equality is of bytes."""
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda").view(dtype).view(shape)


# Of every width; types that one map serves are tested once.
TYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.int32,
         torch.float64, torch.int64]  # fmt: skip
OUTER = {1: (), 2: (11,), 3: (3, 5), 4: (2, 1, 7), 5: (2, 3, 1, 5)}
BOXES = {1: (), 2: (8,), 3: (1, 4), 4: (1, 1, 8), 5: (1, 2, 1, 1)}  # as the compiler makes them: rows of one dimension


def problem(rank, swizzle, dtype, ends=False):
    """A tensor with gaps between its rows, and a box: as wide as the swizzle, or 48 bytes.

    Rows end anywhere, or (`ends`) at multiples of 16 bytes: a store across the end of a row writes the rest of the 16
    bytes that the end lies in, so the compiler makes no others.
    """
    row, granule = (swizzle or 48) // dtype.itemsize, 16 // dtype.itemsize
    sizes = (*OUTER[rank], 2 * row + (row // 2 // granule * granule if ends else max(1, row // 2 - 1)))
    whole = random_bytes((*sizes[:-1], -(-sizes[-1] // granule) * granule + granule), dtype)
    return whole, whole[..., : sizes[-1]], (*BOXES[rank], row)


def places(sizes, box, dtype, inside=False):
    """As `_places`, rows from multiples of 16 bytes on, which is what the compiler asks for.

    `inside`: none in front of the tensor, where stores stop the GPU.
    """
    granule = 16 // dtype.itemsize
    for place in _places(sizes, box):
        if not inside or min(place) >= 0:
            yield (*place[:-1], place[-1] // granule * granule)


def _places(sizes, box):
    """Inside, across the end, across the beginning, and outside, in all dimensions and in one.

    A box may not end beyond 31 bits, nor may rows of tensors of more than two dimensions begin anywhere: the GPU stops
    with an illegal instruction.
    """
    zero = (0,) * len(sizes)
    yield zero
    yield tuple(n // 2 for n in sizes)
    yield tuple(n - 1 for n in sizes)
    yield tuple(-(b // 2) for b in box)
    for d, (n, b) in enumerate(zip(sizes, box, strict=True)):
        for at in (1, n - 1, n, n + 1000, -1, -b, -1000):
            yield (*zero[:d], at, *zero[d + 1 :])


@pytest.mark.parametrize("swizzle", MASKS)
@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_loads(dtype, rank, swizzle, functions):
    _, x, box = problem(rank, swizzle, dtype)
    maps, count = maps_of(x, box, swizzle), math.prod(box) * dtype.itemsize
    for place in places(x.shape, box, dtype):
        raw = torch.empty(count, dtype=torch.uint8, device="cuda")
        run(functions[f"load_{rank}"], maps, x, raw, place)
        want = torch.zeros(count, dtype=torch.uint8, device="cuda").view(dtype).view(box)
        there, here = inside(x.shape, box, place)
        want[here] = x[there]
        assert torch.equal(raw[swizzled(count, swizzle)], want.view(-1).view(torch.uint8)), place


@pytest.mark.parametrize("swizzle", MASKS)
@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_stores(dtype, rank, swizzle, functions):
    whole, x, box = problem(rank, swizzle, dtype, ends=True)
    maps, count = maps_of(x, box, swizzle), math.prod(box) * dtype.itemsize
    for place in places(x.shape, box, dtype, inside=True):
        values = random_bytes(box, dtype)
        raw = torch.empty(count, dtype=torch.uint8, device="cuda")
        raw[swizzled(count, swizzle)] = values.view(-1).view(torch.uint8)
        want = whole.clone()
        there, here = inside(x.shape, box, place)
        want[..., : x.shape[-1]][there] = values[here]
        run(functions[f"store_{rank}"], maps, x, raw, place)
        assert torch.equal(whole.view(torch.uint8), want.view(torch.uint8)), place


@pytest.mark.parametrize("swizzle", MASKS)
@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("add", t) for t in (torch.float32, torch.float16, torch.bfloat16, torch.int32)), ("min", torch.int32),
     ("max", torch.int32), ("min", torch.float16), ("max", torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_reductions(name, dtype, rank, swizzle, functions):
    combine = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[name]
    whole, x, box = problem(rank, swizzle, dtype, ends=True)
    whole.copy_(torch.randint(-50, 50, whole.shape, device="cuda"))
    maps, count = maps_of(x, box, swizzle), math.prod(box) * dtype.itemsize
    for place in places(x.shape, box, dtype, inside=True):
        values = torch.randint(-50, 50, box, device="cuda").to(dtype)
        raw = torch.empty(count, dtype=torch.uint8, device="cuda")
        raw[swizzled(count, swizzle)] = values.view(-1).view(torch.uint8)
        want = whole.clone()
        there, here = inside(x.shape, box, place)
        want[..., : x.shape[-1]][there] = combine(x[there], values[here])
        run(functions[f"{name}_{rank}"], maps, x, raw, place)
        assert torch.equal(whole, want), place


def load(functions, x, box, swizzle, place):
    """The box, as a tensor."""
    count = math.prod(box) * x.itemsize
    raw = torch.empty(count, dtype=torch.uint8, device="cuda")
    run(functions[f"load_{x.dim()}"], maps_of(x, box, swizzle), x, raw, place)
    return raw[swizzled(count, swizzle)].view(x.dtype).view(box)


def test_strides(functions):
    """Dimensions in another order, single elements with any stride, slices that begin anywhere."""
    x = random_bytes((6, 10, 4, 64), torch.int16)
    for order in itertools.permutations(range(3)):
        turned = x.permute(*order, 3)
        assert torch.equal(load(functions, turned, (2, 2, 2, 64), 128, (1, 1, 1, 0)), turned[1:3, 1:3, 1:3])
    single = x.as_strided((4, 1, 64), (640, 3, 1))
    assert torch.equal(load(functions, single, (4, 1, 64), 128, (0, 0, 0)), single)
    part = x[..., 8:40]
    assert torch.equal(load(functions, part, (1, 1, 4, 32), 64, (3, 3, 0, 0)), part[3:4, 3:4])
    large = torch.zeros(2, 2**16, 2**16, dtype=torch.uint8, device="cuda")  # more than 2^32 elements
    large[1, -2:] = random_bytes((2, 2**16), torch.uint8)
    assert torch.equal(
        load(functions, large, (1, 4, 128), 128, (1, 2**16 - 2, 2**16 - 64))[0, :2, :64], large[1, -2:, -64:]
    )


def test_repeated_rows(functions):
    """Strides of 0, which cuda.h neither allows nor forbids; batches share an operand by them."""
    x = random_bytes((4, 64), torch.int16).expand(5, 4, 64)
    assert torch.equal(load(functions, x, (5, 4, 64), 128, (0, 0, 0)), x)
    assert torch.equal(
        load(functions, x[:, :1].expand(5, 4, 64), (5, 4, 64), 128, (0, 0, 0)), x[:, :1].expand(5, 4, 64)
    )


def test_largest_boxes(functions):
    x = random_bytes((300, 256), torch.uint8)
    assert torch.equal(load(functions, x, (256, 256), 0, (40, 0)), x[40:296])
    assert torch.equal(load(functions, x, (256, 128), 128, (40, 128)), x[40:296, 128:])


# Through launchers.

COPY = """
extern "C" __global__ void __launch_bounds__(32)
copy(const __grid_constant__ Map from, int rows, const __grid_constant__ Map to, int half) {
  BOX_AND_BARRIER
  int row = 32 * blockIdx.x, column = 64 * blockIdx.y;
  if (threadIdx.x == 0) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    expect(barrier, 4096);
    asm volatile(LOAD("2") "[%0], [%1, {%3, %4}], [%2];"
                 :: "r"(box), "l"(&from), "r"(barrier), "r"(column), "r"(row) : "memory");
  }
  __syncwarp();
  wait(barrier);
  unsigned cluster;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cluster));
  for (int i = threadIdx.x; i < 2048; i += 32) {
    unsigned short* value = (unsigned short*)(memory + 1024) + i;
    *value = half ? *value / 2 * cluster : *value;
  }
  fence();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile(STORE("2") "[%0, {%2, %3}], [%1];" :: "l"(&to), "r"(box), "r"(column), "r"(row) : "memory");
    stored();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
"""


@pytest.fixture(params=["native", "python"])
def make(request, functions, monkeypatch):
    """Makes launchers of `copy` that go the one way or the other."""
    if request.param == "python":
        monkeypatch.setattr(cuda_launch, "launch_function", lambda *_: None)
    else:
        assert native() is not None
    m, s = T.dynamic("m, s")

    @T.prim_func
    def copy(x: T.StridedTensor((m, 128), (s, 1), "int16"), y: T.Tensor((m, 128), "int16"), half: T.int32):
        with T.Kernel(T.ceildiv(m, 32), 2, threads=32) as (i, j):
            y[i * 32, j * 64] = x[i * 32, j * 64] + half

    program = copy.program
    sizes, unit = (m, Const(128, int32)), Const(1, int32)
    maps = [MapArg(n, sizes, (step, unit), (32, 64), 128, "int16", 2) for n, step in enumerate((s, Const(128, int32)))]
    args = maps[0], m, maps[1], program.params[2]

    def launcher(**fields):
        entry = Entry("copy", args, program.kernels[0].grid, 32, SHARED, None, "MiMi")._replace(**fields)
        return CudaLauncher(
            program, CudaSource("", (entry,), (16, 16)), compile_cubin(HEAD + COPY, HOPPER).data, HOPPER
        )

    return launcher


def pair(rows):
    x = torch.randint(0, 2**14, (rows, 136), dtype=torch.int16, device="cuda")[:, :128]
    return x, torch.full((rows, 128), -1, dtype=torch.int16, device="cuda")


def test_launchers(make):
    launcher = make()
    kept = [pair(rows) for rows in (1, 31, 32, 33, 1000, 1000, 1000)]
    for _ in range(3):
        for x, y in kept:
            launcher.begin(x, y.fill_(-1), 0)
            assert torch.equal(x, y)
    with pytest.raises(LaunchError, match="`x` must begin at a multiple of 16 bytes"):
        launcher.begin(torch.empty(1, 136, dtype=torch.int16, device="cuda")[:, 1:129], kept[0][1], 0)


def test_launchers_in_graphs(make):
    """Maps are copied into the graph: other launches in between change nothing."""
    launcher = make()
    (x, y), (other, target) = pair(100), pair(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.begin(x, y, 0)
    for _ in range(3):
        launcher.begin(other, target, 0)
        x.random_(0, 2**14)
        graph.replay()
        assert torch.equal(x, y) and torch.equal(other, target)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (2, 2, 1)])
def test_launchers_with_attributes(cluster, early, make):
    """Each launch depends on the one before; the kernel multiplies by the number of blocks in a cluster."""
    launcher = make(cluster=cluster, early=early)
    for rows in (64, 1000, 64):
        x, y = (each.contiguous() for each in pair(rows))
        want = x.clone()
        for _ in range(6):
            launcher.begin(x, y, 1)
            launcher.begin(y, x, 1)
            want = want // 2 * cluster[0] // 2 * cluster[0]
        assert torch.equal(x, want)
