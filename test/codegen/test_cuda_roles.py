# SPDX-License-Identifier: Apache-2.0
"""Kernels of warps with different roles: their text, and that it compiles without advice of the assembler."""

import pytest
from expecttest import assert_expected_inline
from flat_kernels import SERIAL, at, body, bx, compiles, emitted, kernel, load, loop, number, program, put, tensor

from torch_tile.codegen.cuda_roles import condition, registers_call
from torch_tile.intrinsics import bulk, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ir.stmt import Alloc, Block, If, Role
from torch_tile.ir.tensor_map import TensorMap
from torch_tile.lowering.hopper.init_mbarriers import init_barriers

PANELS = wgmma.Descriptor(128, 16, 1024)
TYPES = ("bfloat16", "bfloat16", "float32")
t = Var("t", dt.int32, "thread")


def roles(*spans):
    return [Role(first, count, Block(())) for first, count in spans]


@pytest.mark.parametrize(
    ("spans", "tests"),
    [
        ([(0, 256), (256, 32)], ["t < 256", ""]),
        ([(256, 32), (0, 256)], ["t >= 256", ""]),
        ([(0, 128), (128, 128), (256, 128)], ["t < 128", "t < 256", ""]),
        ([(128, 128), (0, 64)], ["t >= 128 && t < 256", "t < 64"]),
        ([(0, 384)], [""]),
        ([(352, 32), (320, 32), (0, 32)], ["t >= 352", "t >= 320", "t < 32"]),
    ],
)
def test_branches(spans, tests):
    """No thread is asked what the branches before have answered."""
    threads, given = 384 if spans[0] not in [(0, 256), (256, 32)] else 288, roles(*spans)
    found = [condition(role, given[:n], threads, "t") for n, role in enumerate(given)]
    assert found == tests
    for thread in range(0, threads, 32):
        true = (n for n, test in enumerate(found) if eval(test.replace("&&", "and") or "True", {"t": thread}))
        taken = next(true, None)
        assert taken == next((n for n, (first, count) in enumerate(spans) if first <= thread < first + count), None)


def test_registers():
    def given(registers, threads, blocks=1):
        return registers_call(Role(0, 128, Block(()), registers), threads, blocks)

    assert given(0, 384) == given(168, 384) == given(128, 512) == ""
    assert given(240, 384) == "tile::set_registers<240, true>();"
    assert given(24, 384) == "tile::set_registers<24, false>();"
    assert given(136, 256, 3) == "tile::set_registers<136, true>();"  # 80 each, of which three blocks have room
    assert given(80, 256, 3) == "" and given(136, 256) == "tile::set_registers<136, false>();"


def product(registers=(0, 0), producers=32, stages=2):
    """Two warpgroups multiply what a role of its own brings."""
    m = Var("m", dt.int32, "dim")
    a, c = tensor("A", (m, 1024), "bfloat16"), tensor("C", (m, 128), "float32")
    tile = tensor("tile", (stages, 128, 64), "bfloat16", "shared", offset=0)
    full = Buffer("full", (number(stages),), dt.uint64, "barrier", offset=stages * 16384, arrivals=1)
    empty = Buffer("empty", (number(stages),), dt.uint64, "barrier", offset=stages * 16384 + 8 * stages, arrivals=8)
    acc = tensor("acc", (64,), "float32", "local")

    def boxes():
        return TensorMap(a, (m, number(1024)), (number(1024), number(1)), (128, 64), 128)

    def multiply(k):
        here = at(tile, k % stages, 0, 0)
        group = t // 128 * 8192
        steps = loop(4, lambda s: wgmma.wgmma(
            at(acc, 0), here, here, 128, TYPES, PANELS, PANELS, group + s * 32, s * 32), name="s")  # fmt: skip
        return (
            bulk.mbarrier_wait(at(full, k % stages), k // stages % 2), wgmma.wgmma_fence(), steps,
            wgmma.wgmma_commit(), wgmma.wgmma_wait(0), bulk.warp_arrive(at(empty, k % stages)),
        )  # fmt: skip

    def bring(k):
        ready = at(full, k % stages)
        load_box = bulk.tma_load(at(tile, k % stages, 0, 0), boxes(), (bx * 128, k * 64), ready, "evict_last")
        moves = bulk.mbarrier_expect(ready, 16384), load_box, bulk.mbarrier_arrive(ready)
        wait = bulk.mbarrier_wait(at(empty, k % stages), (k // stages + 1) % 2)
        return wait, If(t - 256 == 0, Block(moves), Block(()))

    consume = (
        Alloc(acc), loop(64, lambda i: put(acc, i, 0.0)), loop(16, multiply, SERIAL, "k"),
        loop(64, lambda i: put(c, bx * 128 + t // 2, t % 2 * 64 + i, load(acc, i))),
    )  # fmt: skip
    produce = If(t - 256 < 32, Block((loop(16, bring, SERIAL, "k"),)), Block(()))
    stmts = (
        Alloc(tile), Alloc(full), Alloc(empty),
        Role(0, 256, Block(consume), registers[0]), Role(256, producers, Block((produce,)), registers[1]),
    )  # fmt: skip
    shared = stages * 16384 + 16 * stages
    return init_barriers(program([a, c], kernel(
        *stmts, threads=256 + producers, thread=t, grid=((m + 127) // 128,), shared_bytes=shared,
    )))  # fmt: skip


def test_text():
    source = product()
    assert_expected_inline(body(source).split("\n\n", 1)[1], """\
extern "C" __global__ void __launch_bounds__(288, 1)
demo_kernel(float* C, const __grid_constant__ tile::TensorMap A_map) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int t = threadIdx.x;
  const int bx = blockIdx.x;
  const int warpgroup = tile::warpgroup_index();
  tile::bf16* const tile_1 = reinterpret_cast<tile::bf16*>(shared_memory + 0);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared_memory + 32768);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(shared_memory + 32784);
  if (t == 0) {
    tile::prefetch_map(&A_map);
    tile::mbarrier_init<1>(full);
    tile::mbarrier_init<1>(full + 1);
    tile::mbarrier_init<8>(empty);
    tile::mbarrier_init<8>(empty + 1);
    tile::fence_barrier_init();
  }
  tile::barrier();
  if (t < 256) {
    alignas(16) float acc[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      acc[i] = 0.0f;
    }
    #pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      tile::mbarrier_wait(full + k % 2, k / 2 % 2);
      tile::wgmma_fence();
      tile::wgmma_m64n128k16_f32_bf16_bf16_ss_x4<tile::Walk<128, 16, 1024, false, 32, 4, 0>, tile::Walk<128, 16, 1024, false, 32, 4, 0>>(acc, tile_1 + k % 2 * 8192, tile_1 + k % 2 * 8192, warpgroup * 8192, 0, true);
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::warp_arrive(empty + k % 2);
    }
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      C[(int64_t)bx * 16384 + t / 2 * 128 + t % 2 * 64 + i] = acc[i];
    }
  } else {
    if (t - 256 < 32) {
      #pragma unroll 1
      for (int k = 0; k < 16; ++k) {
        tile::mbarrier_wait(empty + k % 2, (k / 2 + 1) % 2);
        if (t - 256 == 0) {
          tile::mbarrier_expect(full + k % 2, 16384);
          tile::tma_load_evict_last(tile_1 + k % 2 * 8192, &A_map, full + k % 2, bx * 128, k * 64);
          tile::mbarrier_arrive(full + k % 2);
        }
      }
    }
  }
}
""")  # fmt: skip  # noqa: E501
    (entry,) = emitted(source).entries
    assert entry.kinds == "PM" and entry.threads == 288 and not entry.early
    compiles(source, ("sm_90a",))


def test_registers_move():
    source = product((240, 24), 128, 3)
    text = body(source)
    assert text.index("set_registers<240, true>") < text.index("alignas(16) float acc")
    assert text.index("} else {\n    tile::set_registers<24, false>();") > 0
    compiles(source, ("sm_90a",))


def test_a_thread_of_a_role_is_known_to_lie_in_it():
    """So its index within the role divides as natural numbers do."""
    x = tensor("x", (128,), "int32")
    first = Role(64, 32, Block((put(x, t, (t - 64) // 2),)))
    second, after = Role(0, 32, Block((put(x, t, (t - 64) // 2),))), put(x, t, (t - 64) // 2)
    source = program([x], kernel(first, second, after, thread=t))
    text = body(source)
    assert text.count("x[t] = (t - 64) / 2;") == 1 and text.count("x[t] = tile::floordiv<int>(t - 64, 2);") == 2
    assert "if (t >= 64 && t < 96) {" in text and "} else if (t < 32) {" in text
