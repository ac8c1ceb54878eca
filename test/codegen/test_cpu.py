# SPDX-License-Identifier: Apache-2.0
"""The C++ of small kernels, one feature each.

EXPECTTEST_ACCEPT=1 writes the text of a test anew. Run one test at a time then: kernels are read from this file.
"""

import re
import subprocess
import sys

from expecttest import assert_expected_inline

import torch_tile.language as T
from torch_tile.codegen.cpu import STACK_LIMIT, STACK_TOTAL, emit_cpu
from torch_tile.ir.stmt import dimensions
from torch_tile.lowering import lower


def source(kernel):
    """All of the text without the names of the author's file."""
    text = emit_cpu(lower(kernel.program), dimensions(kernel.program)).text
    return re.sub(r"  // [\w.]+:\d+$", "", text, flags=re.MULTILINE)


def block(kernel, number=0):
    """The body of the function that runs one block."""
    body = source(kernel).split(f"static int64_t block_{number}(")[1].split(" {\n", 1)[1].split("\n}\n")[0]
    return "\n".join(line.removeprefix("  ") for line in body.split("\n") if line != "  return 0;")


def test_entry():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m, 4), "float16"), scale: T.float16, n: T.int32, flag: T.bool):
        with T.Kernel(m, 4) as (b, c):
            if flag:
                x[b, c] = scale * n

    assert_expected_inline(source(kernel), """\
#include <stdlib.h>
#include "cpu_types.h"
#include "cpu_math.h"
#include "cpu_reduce.h"
#include "cpu_gemm.h"
#include "cpu_atomic.h"

static int64_t block_0(tile::f16* x, int64_t m, float scale, int64_t n, bool flag, char* arena, int64_t b, int64_t c) {
  if (flag) {
    x[b * 4 + c] = tile::narrow<tile::f16>(scale * tile::rounded<tile::f16>((float)n));
  }
  return 0;
}

extern "C" int64_t tile_main(void* const* buffers, const int64_t* numbers) {
  tile::f16* x = (tile::f16*)buffers[0];
  const double* reals = (const double*)numbers;
  int64_t m = (int64_t)numbers[0];
  float scale = tile::rounded<tile::f16>((float)reals[1]);
  int64_t n = (int64_t)numbers[2];
  bool flag = (bool)numbers[3];
  int64_t failed = 0;
  {
    const int64_t grid_x = m;
    const int64_t grid_y = 4;
    const int64_t blocks = grid_x * grid_y;
    const int64_t chunk = blocks / 256 + 1;
    #pragma omp parallel if (blocks > 1)
    {
      char* arena = nullptr;
      #pragma omp for schedule(dynamic, chunk)
      for (int64_t block = 0; block < blocks; ++block) {
        int64_t code = block_0(x, m, scale, n, flag, arena, block % grid_x, block / grid_x);
        if (code) __atomic_store_n(&failed, code, __ATOMIC_RELAXED);
      }
    }
    if (failed) return failed;
  }
  return 0;
}
""")  # fmt: skip


def test_guarded_copy():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, 64)) as b:
            tile = T.alloc_shared((64,), "float32")
            T.copy(x[b * 64], tile)
            T.copy(tile, x[b * 64 + 1])

    assert_expected_inline(block(kernel), """\
alignas(64) float tile[64];
#pragma omp simd
for (int64_t i = 0; i < tile::min<int64_t>(m - b * 64, 64); ++i) {
  tile[i] = x[b * 64 + i];
}
#pragma omp simd
for (int64_t i = tile::min<int64_t>(m - b * 64, 64); i < 64; ++i) {
  tile[i] = 0.0f;
}
#pragma omp simd
for (int64_t i = 0; i < tile::min<int64_t>(m - (b * 64 + 1), 64); ++i) {
  x[b * 64 + 1 + i] = tile[i];
}""")  # fmt: skip


def test_conversions():
    @T.prim_func
    def kernel(b: T.Tensor((8,), "bfloat16"), h: T.Tensor((8,), "float16"), e: T.Tensor((8,), "float8_e4m3fn"),
               i: T.Tensor((8,), "int8")):  # fmt: skip
        with T.Kernel(1) as _:
            for k in T.Parallel(8):
                h[k] = b[k] + h[k]
                b[k] = e[k] * 2
                e[k] = i[k]
                i[k] = T.cast(h[k], "int8")

    assert_expected_inline(block(kernel), """\
#pragma omp simd
for (int64_t k = 0; k < 8; ++k) {
  h[k] = tile::narrow<tile::f16>(tile::widen(b[k]) + tile::widen(h[k]));
  b[k] = tile::narrow<tile::bf16>(tile::rounded<tile::e4m3>(tile::widen(e[k]) * 2.0f));
  e[k] = tile::narrow<tile::e4m3>((float)i[k]);
  i[k] = tile::convert<int8_t>(tile::widen(h[k]));
}""")  # fmt: skip


def test_integers():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "int32"), u: T.Tensor((8,), "uint8"), n: T.int64):
        with T.Kernel(8) as b:
            x[b] = x[b] * x[b] + b
            u[b] = u[b] - T.uint8(3)
            if x[b] + 1 < n:
                x[x[b] * 2] = x[b] // 3 + b // 3 + (b - 1) % 3

    assert_expected_inline(block(kernel), """\
x[b] = (int32_t)((int64_t)x[b] * (int64_t)x[b] + b);
u[b] = (uint8_t)(u[b] - 3);
if ((int64_t)x[b] + 1 < n) {
  if ((int64_t)x[b] * 2 >= 0 && (int64_t)x[b] * 2 < 8) {
    x[(int64_t)x[b] * 2] = (int32_t)(tile::floordiv<int64_t>((int64_t)x[b], 3) + b / 3 + tile::floormod<int64_t>(b - 1, 3));
  }
}""")  # fmt: skip  # noqa: E501


def test_choices():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32"), y: T.Tensor((8,), "float64")):
        with T.Kernel(8) as b:
            x[b] = T.if_then_else(b > 3 and x[b] > 0, T.max(x[b], 1), -x[b]) + 1
            y[b] = T.min(y[b], x[b]) // 2
            y[b] = T.exp(y[b]) - T.abs(x[b])

    assert_expected_inline(block(kernel), """\
x[b] = (b > 3 && x[b] > 0.0f ? tile::max(x[b], 1.0f) : -x[b]) + 1.0f;
y[b] = tile::floordiv<double>(tile::min(y[b], (double)x[b]), 2.0);
y[b] = tile::exp(y[b]) - (double)tile::abs(x[b]);""")  # fmt: skip


def test_reductions():
    @T.prim_func
    def kernel(out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            x = T.alloc_fragment((4, 8), "float16")
            rows = T.alloc_fragment((4,), "float32")
            columns = T.alloc_fragment((8,), "float32")
            T.fill(x, 1)
            T.reduce_sum(x, rows, dim=1)
            T.reduce_absmax(x, rows, dim=1, clear=False)
            T.reduce_max(x, columns, dim=0)

    assert_expected_inline(block(kernel), """\
alignas(64) tile::f16 x[32];
alignas(64) float rows[4];
alignas(64) float columns[8];
for (int64_t i = 0; i < 4; ++i) {
  #pragma omp simd
  for (int64_t j = 0; j < 8; ++j) {
    x[i * 8 + j] = tile::narrow<tile::f16>(1.0f);
  }
}
for (int64_t i = 0; i < 4; ++i) {
  rows[i] = tile::reduce<tile::Sum, float>(x + i * 8, 8);
}
for (int64_t i = 0; i < 4; ++i) {
  rows[i] = tile::fmax(rows[i], tile::reduce<tile::AbsMaxNumber, float>(x + i * 8, 8));
}
#pragma omp simd
for (int64_t i = 0; i < 8; ++i) {
  columns[i] = (-__builtin_inff());
}
for (int64_t k = 0; k < 4; ++k) {
  #pragma omp simd
  for (int64_t i = 0; i < 8; ++i) {
    columns[i] = tile::fmax(columns[i], tile::widen(x[k * 8 + i]));
  }
}""")  # fmt: skip


def test_scan():
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            x = T.alloc_fragment((8,), "float32")
            T.fill(x, 3)
            T.cumsum(x, dim=0, reverse=True)
            T.copy(x, out)

    assert_expected_inline(block(kernel), """\
alignas(64) float x[8];
#pragma omp simd
for (int64_t i = 0; i < 8; ++i) {
  x[i] = 3.0f;
}
for (int64_t k = 0; k < 8; ++k) {
  x[-k + 7] = k > 0 ? x[-k + 8] + x[-k + 7] : x[7];
}
#pragma omp simd
for (int64_t i = 0; i < 8; ++i) {
  out[i] = x[i];
}""")  # fmt: skip


def test_gemm():
    @T.prim_func
    def kernel(out: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((2, 8, 4), "bfloat16")
            b = T.alloc_shared((4, 8), "bfloat16")
            c = T.alloc_fragment((4, 4), "float32")
            a[0, 0, 0], b[0, 0], c[0, 0] = 1.0, 2.0, 3.0
            T.gemm(a[1, :, :], b, c, transpose_A=True, transpose_B=True)

    assert_expected_inline(block(kernel), """\
alignas(64) tile::bf16 a[64];
alignas(64) tile::bf16 b[32];
alignas(64) float c[16];
a[0] = tile::narrow<tile::bf16>(1.0f);
b[0] = tile::narrow<tile::bf16>(2.0f);
c[0] = 3.0f;
tile::gemm<tile::bf16, tile::bf16, float, true, true>(a + 32, 4, b, 8, c, 4, 4, 4, 8);""")  # fmt: skip


def test_atomics():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m,), "float32"), h: T.Tensor((4,), "float16")):
        with T.Kernel(4) as b:
            T.atomic_add(x[b * 2], 1)
            T.atomic_max(h[b], x[b])

    assert_expected_inline(block(kernel), """\
if (b * 2 < m) {
  tile::atomic_add<float>(x + b * 2, 1.0f);
}
tile::atomic_max<tile::f16>(h + b, tile::narrow<tile::f16>(b < m ? x[b] : 0.0f));""")  # fmt: skip


def test_control_flow():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "int32")):
        with T.Kernel(1) as _:
            v = T.alloc_var("int32", 0)
            h = T.alloc_var("float16", 0.5)
            while v < 100:
                v += x[0]
                if v == 7:
                    continue
                if v < 9:
                    h = h * 2
                else:
                    break
            for i in T.unroll(1, 4):
                for i in T.serial(0, 8, 3):
                    x[i] = v
            x[0] = T.cast(h, "int32")

    assert_expected_inline(block(kernel), """\
int32_t v = 0;
tile::f16 h = tile::narrow<tile::f16>(0.5f);
while (v < 100) {
  v = v + x[0];
  if (v == 7) {
    continue;
  }
  if (v < 9) {
    h = tile::narrow<tile::f16>(tile::widen(h) * 2.0f);
  } else {
    break;
  }
}
#pragma GCC unroll 16
for (int64_t i = 1; i < 4; ++i) {
  for (int64_t i_1 = 0; i_1 < 8; i_1 += 3) {
    x[i_1] = v;
  }
}
x[0] = tile::convert<int32_t>(tile::widen(h));""")  # fmt: skip


def test_names_of_values():
    @T.prim_func
    def kernel(x: T.Tensor((8, 8), "float16")):
        with T.Kernel(8) as b:
            row = b * 2 % 8
            value = x[row, 0] * 0.5
            count = T.cast(value, "int32")
            x[row, count] = value

    assert_expected_inline(block(kernel), """\
const int64_t row = b * 2 % 8;
const float value = tile::rounded<tile::f16>(tile::widen(x[row * 8]) * 0.5f);
const int32_t count = tile::convert<int32_t>(value);
if (count >= 0 && count < 8) {
  x[row * 8 + (int64_t)count] = tile::narrow<tile::f16>(value);
}""")  # fmt: skip


def test_messages():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float16"), n: T.int32):
        with T.Kernel(8) as b:
            T.device_assert(n > b, "small")
            T.print(x[b], msg='50% of "x"')
            T.print(n)

    assert_expected_inline(block(kernel), """\
if (!(n > b)) return 1;
printf("50%% of \\"x\\": %g\\n", (double)tile::widen(x[b])); fflush(stdout);
printf("%lld\\n", (long long)n); fflush(stdout);""")  # fmt: skip
    asserts = emit_cpu(lower(kernel.program)).asserts
    assert [(m, span.source().strip()) for m, span in asserts] == [("small", 'T.device_assert(n > b, "small")')]


def test_strides():
    m, n, s = T.dynamic("m, n, s")

    @T.prim_func
    def kernel(x: T.StridedTensor((m, n), (s, 2), "float32")):
        with T.Kernel(m) as b:
            for j in T.Parallel(n):
                x[b, j] = 0

    assert_expected_inline(block(kernel), """\
#pragma omp simd
for (int64_t j = 0; j < n; ++j) {
  x[b * s + j * 2] = 0.0f;
}""")  # fmt: skip


def test_small_tiles_on_the_stack_large_ones_in_the_arena():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32")):
        with T.Kernel(2) as _:
            small = T.alloc_shared((STACK_LIMIT // 4,), "float32")
            large = T.alloc_shared((STACK_LIMIT // 4 + 1,), "float32")
            bytes_ = T.alloc_local((STACK_LIMIT + 1,), "uint8")
            small[0], large[0], bytes_[0] = 1.0, 2.0, 3
            x[0] = small[0] + large[0] + bytes_[0]

    assert_expected_inline(block(kernel), """\
float* const large = (float*)__builtin_assume_aligned(arena + 0, 64);
uint8_t* const bytes_ = (uint8_t*)__builtin_assume_aligned(arena + 16448, 64);
alignas(64) float small[4096];
small[0] = 1.0f;
large[0] = 2.0f;
bytes_[0] = 3;
x[0] = small[0] + large[0] + (float)bytes_[0];""")  # fmt: skip
    assert f"aligned_alloc(64, {STACK_LIMIT * 2 + 128})" in source(kernel)


def test_many_small_tiles_do_not_fill_the_stack():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            tiles = [T.alloc_shared((STACK_LIMIT // 4,), "float32") for _ in range(40)]
            for tile in tiles:
                tile[0] = 1.0
                x[0] = tile[0]

    assert block(kernel).count("alignas(64) float") == STACK_TOTAL // STACK_LIMIT
    assert f"aligned_alloc(64, {40 * STACK_LIMIT - STACK_TOTAL})" in source(kernel)


SMALL_STACK = """
import threading, torch, torch_tile, torch_tile.language as T

@T.prim_func
def kernel(x: T.Tensor((8,), "float32"), n: T.int32):
    with T.Kernel(1) as _:
        tiles = [T.alloc_shared((4096,), "float32") for _ in range(12)]
        for tile in tiles:
            for i in T.Parallel(4096):
                tile[i] = x[i % 8] + n
        for tile in tiles:
            for i in T.serial(8):
                x[i] += tile[i * n]

def run():
    torch_tile.compile(kernel, target="cpu")(x, 1)
    q = torch.ones(1, 2, 90, 64)
    print(x.tolist() == [25.0] * 8, torch.allclose(torch.ops.tile.attention(q, q, q), q))

x = torch.ones(8)
torch.set_num_threads(1)
threading.stack_size(128 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_threads_with_small_stacks(tmp_path):
    (tmp_path / "small_stack.py").write_text(SMALL_STACK)
    run = [sys.executable, str(tmp_path / "small_stack.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", (done.returncode, done.stderr[-2000:])


def test_two_kernels_share_a_workspace():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m,), "float32")):
        out = T.empty((m,), "float32")
        scratch = T.alloc_global((m, 2), "float32")
        with T.Kernel(m) as b:
            scratch[b, 1] = x[b]
        with T.Kernel(m) as b:
            out[b] = scratch[m - 1 - b, 1]
        return out

    assert_expected_inline(
        block(kernel, 0) + "\n--\n" + block(kernel, 1), """\
scratch[b * 2 + 1] = x[b];
--
out[b] = scratch[m * 2 - b * 2 - 1];""")  # fmt: skip
    assert "block_1(float* x, float* out, float* scratch, int64_t m, char* arena, int64_t b)" in source(kernel)
