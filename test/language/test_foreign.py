# SPDX-License-Identifier: Apache-2.0
"""Text of the author's own: CUDA, C++ and PTX, called from kernels; what it does to memory, and what it means."""

import numpy as np
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

SCALE = """
static inline float twice(float x) { return 2.0f * x; }
static inline void scale(const float* a, float* b, int n) { for (int i = 0; i < n; ++i) b[i] = a[i] * 3.0f; }
"""
SCALE_CUDA = SCALE.replace("static inline", "__device__ __forceinline__")


def scale(a, b, n):
    b[:n] = a[:n] * 3


def test_values_and_pointers(way):
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source(SCALE_CUDA)
            T.import_source(SCALE, target="cpu")
            for i in T.Parallel(128):
                B[i] = T.call_extern("float32", "twice", A[i] + 1.0, evaluate=lambda x: 2 * x)
            for i in T.Parallel(32):
                a, c = T.access_ptr(A[i * 4], "r", 4), T.access_ptr(C[i * 4], "w", 4)
                T.call_extern("handle", "scale", a, c, 4, evaluate=scale)

    a, b, c = torch.randn(128), torch.zeros(128), torch.zeros(128)
    way(kernel, a, b, c)
    assert torch.equal(b, 2 * (a + 1)) and torch.equal(c, 3 * a)


def test_registers_of_threads(way_of_threads):
    """Products of int8 by a function of the author's, in arrays of each thread, under T.evaluate."""
    source = """
    template <typename A, typename B, typename C> __device__ void DP4A(const A* a, const B* b, C* c) {
      for (int i = 0; i < 4; ++i) *c += a[i] * b[i];
    }
    """

    def dp4a(a, b, c):
        c[0] += int(a[:4].astype(int) @ b[:4].astype(int))

    @T.prim_func
    def kernel(A: T.Tensor((64, 16), "int8"), B: T.Tensor((64, 16), "int8"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            T.import_source(source)
            tx = T.get_thread_binding(0)
            a, b, c = T.alloc_local((16,), "int8"), T.alloc_local((16,), "int8"), T.alloc_local((1,), "int32")
            c[0] = 0
            for k in T.serial(16):
                a[k] = A[tx, k]
                b[k] = B[tx, k]
            for k in T.serial(4):
                T.evaluate(
                    T.call_extern(
                        "handle", "DP4A", T.address_of(a[k * 4]), T.address_of(b[k * 4]), T.address_of(c[0]),
                        effects={0: "r 4", 1: "r 4", 2: "rw 1"}, evaluate=dp4a,
                    )
                )  # fmt: skip
            C[tx] = c[0]

    a, b = (torch.randint(-128, 128, (64, 16), dtype=torch.int8) for _ in "ab")
    c = torch.zeros(64).int()
    way_of_threads(kernel, a, b, c)
    assert torch.equal(c, (a.int() * b.int()).sum(1).int())


@pytest.fixture(params=["cuda:sm_80", "cuda:sm_90a", "text"])
def way_of_threads(request):
    """As `way`, of kernels that name the running thread."""
    from emulate import emulate

    def run(kernel, *args):
        made = tilelang.compile(kernel, target="cuda:sm_80" if request.param == "text" else request.param)
        if request.param == "text":
            emulate(made, *args)
            return
        findings = made.interpret(*args)
        assert not findings, findings.report()

    return run


def test_tiles_of_shared_memory_lie_row_by_row():
    """A tile that a product would swizzle is seen as a C array; barriers stand between what threads do to it."""
    source = """
    __device__ void fill_row(__half* row, int n, float x) { for (int i = 0; i < n; ++i) row[i] = __float2half(x); }
    """

    def fill_row(row, n, x):
        row[:n] = x

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            T.import_source(source)
            tx = T.get_thread_binding(0)
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            if tx < 64:
                row = T.access_ptr(b[tx, 0], "w", 64)
                T.call_extern("handle", "fill_row", row, 64, T.cast(tx, "float32"), evaluate=fill_row)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c, C)

    a, c = torch.randint(-3, 4, (64, 64)).half(), torch.zeros(64, 64)
    made = tilelang.compile(kernel, target="cuda:sm_80")
    findings = made.interpret(a, c)
    assert not findings, findings.report()
    rows = torch.arange(64).float()[:, None].expand(64, 64)
    assert torch.equal(c, a.float() @ rows)
    assert "#include <cuda_fp16.h>" in made.get_kernel_source() and "(__half*)" in made.get_kernel_source()


def test_undeclared_effects_are_the_worst():
    """Threads that may write all of a tile race; and a read by others waits for a barrier."""

    def touch(a, i):
        a[i] += 1

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source("__device__ void touch(float* a, int i) { a[i] += 1; }")
            tx = T.get_thread_binding(0)
            tile = T.alloc_shared((32,), "float32")
            tile[tx] = A[tx]
            T.call_extern("handle", "touch", T.address_of(tile[0]), tx, evaluate=touch)
            A[tx] = tile[31 - tx]

    made = tilelang.compile(kernel, target="cuda:sm_80")
    assert made.get_kernel_source().count("tile::barrier()") == 2
    assert "race" in made.interpret(torch.zeros(32)).report()


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_instructions(target):
    def brev(x):
        return int(f"{int(x) & 0xFFFFFFFF:032b}"[::-1], 2)

    def load(a):
        return a[0]

    @T.prim_func
    def kernel(A: T.Tensor((64,), "uint32"), B: T.Tensor((64,), "uint32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding(0)
            tile = T.alloc_shared((64,), "float32")
            B[tx] = T.ptx("brev.b32 %0, %1;", A[tx], dtype="uint32", evaluate=brev)
            tile[tx] = T.cast(tx, "float32")
            there = T.access_ptr(tile[63 - tx], "r")
            C[tx] = T.ptx("ld.shared.f32 %0, [%1];", there, dtype="float32", evaluate=load)

    a = torch.randint(0, 2**31, (64,)).to(torch.uint32)
    b, c = torch.zeros(64, dtype=torch.uint32), torch.zeros(64)
    made = tilelang.compile(kernel, target=target)
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert b.tolist() == [brev(x) for x in a.tolist()] and c.tolist() == list(range(63, -1, -1))


def test_pointers():
    """What T.access_ptr and its relatives say of memory."""
    found = []

    @T.prim_func
    def kernel(A: T.Tensor((8, 16), "float32")):
        with T.Kernel(1):
            found.extend(
                [
                    T.access_ptr(A[1, 2]), T.access_ptr(A[1, 2], "rw", 2, 3), T.access_ptr(A[1:3, 0:4], "w"),
                    T.access_ptr(A, 3, extent=5, offset=18), T.tvm_access_ptr("float32", A.data, 35, 4, 2),
                ]
            )  # fmt: skip

    assert kernel.program
    places = [[int(i.value) for i in p.address.indices] for p in found]
    assert places == [[1, 2], [1, 2], [1, 0], [1, 2], [2, 3]]
    assert [(p.kind, p.elements) for p in found] == [("r", 1), ("rw", 6), ("w", 8), ("rw", 5), ("w", 4)]


def test_the_text_is_part_of_what_is_cached(folder):
    def made(factor):
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.import_source(f"static float times(float x) {{ return {factor}.0f * x; }}", target="cpu")
                for i in T.Parallel(4):
                    A[i] = T.call_extern("float32", "times", A[i])

        return tilelang.compile(kernel, target="cpu")

    for factor in (2, 3):
        a = torch.ones(4)
        made(factor)(a)
        assert a.tolist() == [factor] * 4


def test_a_pure_call_only_reads():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source("__device__ float first(const float* a) { return a[0]; }")
            tx = T.get_thread_binding(0)
            B[tx] = T.call_pure_extern("float32", "first", T.address_of(A[tx]), evaluate=lambda a: a[0])

    made = tilelang.compile(kernel, target="cuda:sm_80")
    assert "const float* __restrict__ A" in made.get_kernel_source()
    a, b = torch.randn(32), torch.zeros(32)
    assert not made.interpret(a, b) and torch.equal(a, b)


def test_arrays_are_float32_for_small_floats(way):
    cpu = "static void bump(tile::bf16* a) { *a = tile::narrow<tile::bf16>(tile::widen(*a) + 1.0f); }"
    cuda = cpu.replace("static", "__device__")

    def bump(a):
        assert a.dtype == np.float32
        a[0] += 1

    @T.prim_func
    def kernel(A: T.Tensor((8,), "bfloat16")):
        with T.Kernel(1, threads=32):
            T.import_source(cuda)
            T.import_source(cpu, target="cpu")
            for i in T.Parallel(8):
                T.call_extern("handle", "bump", T.access_ptr(A[i], "rw"), evaluate=bump)

    a = torch.arange(8).bfloat16()
    way(kernel, a)
    assert torch.equal(a, torch.arange(1, 9).bfloat16())


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda f: T.call_extern("handle", "no name!"), "func_name"),
        (lambda f: T.call_extern("handle", "f", f), "fragment"),
        (lambda f: T.call_extern("handle", "f", "text"), "args"),
        (lambda f: T.access_ptr(f, "x"), "access_type"),
        (lambda f: T.call_extern("handle", "f", T.access_ptr(f), effects={0: "all"}), "fragment"),
        (lambda f: T.import_source(3), "source"),
        (lambda f: T.import_source("", target="hip"), "target"),
        (lambda f: T.ptx("nop;", T.cast(1.0, "float16")), "reinterpret"),
    ],
)
def test_what_is_refused(wrong, text):
    with pytest.raises(TileError, match=text):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=128):
                wrong(T.alloc_fragment((16, 16), "float16"))


WHOLE = """
extern "C" __global__ void __launch_bounds__(64) other(float* x) { x[0] = 0; }
extern "C" __global__ void __launch_bounds__(64, 1) add_rows(const float* __restrict__ a, float* b, int n) {
  __shared__ float kept[64];
  kept[threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i < n) b[i] = kept[63 - threadIdx.x] + OFFSET;
}
"""


@pytest.mark.parametrize("from_file", [False, True])
def test_whole_kernels(from_file, tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(WHOLE)

    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), n: T.int32):
        T.CUDASourceCodeKernel(
            2, threads=64, source_code_or_path=path if from_file else WHOLE, entry_name="add_rows",
            prelude="#define OFFSET 1.0f",
        )  # fmt: skip

    made = tilelang.compile(kernel, target="cuda:sm_80")
    source = made.get_kernel_source()
    assert "add_rows(A, B, n);" in source and "const float* A" in source
    assert made.cubin.resources["kernel_kernel"].shared == 256 and not made.cubin.warnings
    with pytest.raises(TileError, match="cannot look inside"):
        made.interpret(torch.zeros(128), torch.zeros(128), 100)


@pytest.mark.parametrize("name, count", [("missing", 3), ("add_rows", 2)])
def test_whole_kernels_take_the_parameters_around(name, count):
    with pytest.raises(TileError, match="other, add_rows" if name == "missing" else "takes 3 parameters"):

        @T.prim_func
        def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
            T.CUDASourceCodeKernel(2, threads=64, source_code_or_path=WHOLE, entry_name=name)


def test_a_prelude_is_text_to_call(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        T.import_source(SCALE, target="cpu")
        with T.Kernel(1, threads=32, prelude=SCALE_CUDA):
            for i in T.Parallel(8):
                A[i] = T.call_extern("float32", "twice", A[i], evaluate=lambda x: 2 * x)

    a = torch.arange(8).float()
    way(kernel, a)
    assert a.tolist() == [2.0 * n for n in range(8)]


def test_conversions_of_cudas_headers_need_no_text(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((3, 64), "float32"), C: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[0, i] = T.call_extern("float32", "__half2float", T.call_extern("float16", "__float2half_rz", A[i]))
                B[1, i] = T.call_extern("float16", "__float2half_ru", A[i])
                B[2, i] = T.call_extern("bfloat16", "__float2bfloat16_rn", A[i])
                C[i] = T.call_extern("uint32", "__float_as_uint", A[i])

    a, b, c = torch.randn(64), torch.zeros(3, 64), torch.zeros(64, dtype=torch.uint32)
    way(kernel, a, b, c)
    below, above = b[0], b[1]
    assert (below.abs() <= a.abs()).all() and (above >= a).all()
    assert torch.equal(below.half().float(), below) and torch.equal(above.half().float(), above)
    assert ((above - below).abs() <= a.abs() * 2**-9).all()
    assert torch.equal(b[2], a.bfloat16().float()) and torch.equal(c.view(torch.int32), a.view(torch.int32))


def test_a_conversion_takes_one_value():
    with pytest.raises(TileError, match="one value to convert"):

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float16")):
            with T.Kernel(1, threads=32):
                A[0] = T.call_extern("float16", "__float2half_rz", 1.0, 2.0)


def test_the_types_name_behind_the_operands(way):
    """`T.call_extern(name, *operands, dtype=...)`, also for a function that the text declares as void."""

    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source(SCALE_CUDA)
            T.import_source(SCALE, target="cpu")
            for i in T.Parallel(128):
                B[i] = T.call_extern("twice", A[i], dtype="float32", evaluate=lambda x: 2 * x)
            for i in T.Parallel(32):
                a, c = T.access_ptr(A[i * 4], "r", 4), T.access_ptr(C[i * 4], "w", 4)
                T.call_extern("scale", a, c, 4, dtype=T.float32, evaluate=scale)

    a, b, c = torch.randn(128), torch.zeros(128), torch.zeros(128)
    way(kernel, a, b, c)
    assert torch.equal(b, 2 * a) and torch.equal(c, 3 * a)


def test_whole_kernels_may_take_sizes():
    """Names of T.dynamic follow the tensors, each once."""
    m, n = T.dynamic("m, n")
    text = """
    extern "C" __global__ void copy_rows(float* a, float* b, int rows, int columns) {
      int i = blockIdx.x * 64 + threadIdx.x;
      if (i < rows * columns) b[i] = a[i];
    }
    """

    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), B: T.Tensor((m, n), "float32")):
        T.CUDASourceCodeKernel(T.ceildiv(m * n, 64), threads=64, source_code_or_path=text, entry_name="copy_rows")

    made = tilelang.compile(kernel, target="cuda:sm_80")
    assert "copy_rows(A, B, m, n);" in made.get_kernel_source() and not made.cubin.warnings


@pytest.mark.parametrize("kind, word", [("uint32", "uint"), ("uint16", "ushort"), ("uint64", "ulong")])
def test_short_names_of_integers(kind, word, way):
    """Text for nvcc may say uint, ushort and ulong, as may text for g++."""
    text = f"static inline {word} turned({word} x) {{ {word} y = x; return ~y; }}"
    most = 2 ** (8 * torch.empty(0, dtype=getattr(torch, kind)).element_size() - 1) - 1

    @T.prim_func
    def kernel(A: T.Tensor((32,), kind), B: T.Tensor((32,), kind)):
        with T.Kernel(1, threads=32):
            T.import_source(text.replace("static inline", "__device__ __forceinline__"))
            T.import_source(f"#include <sys/types.h>\n{text}", target="cpu")
            for i in T.Parallel(32):
                B[i] = T.call_extern(kind, "turned", A[i], evaluate=lambda x: 2 * most + 1 - int(x))

    a = torch.randint(0, most, (32,)).to(getattr(torch, kind))
    b = torch.zeros_like(a)
    way(kernel, a, b)
    assert [x + y for x, y in zip(a.tolist(), b.tolist(), strict=True)] == [2 * most + 1] * 32
    if word == "uint":
        assert tilelang.compile(kernel, target="cuda:sm_90a").cubin.data
