# SPDX-License-Identifier: Apache-2.0
from cuda_shim import compile_everywhere

KERNEL = '#include "sync.h"\nextern "C" __global__ void __launch_bounds__(384, 1) k() { CALLS }'


def test_barriers_compile():
    compile_everywhere(KERNEL.replace("CALLS", "tile::barrier(); tile::warp_barrier();"))
    compile_everywhere(KERNEL.replace("CALLS", "tile::named_barrier<1, 256>(); tile::named_barrier_arrive<15, 384>();"))


def test_early_starts_compile():
    compile_everywhere(KERNEL.replace("CALLS", "tile::grid_launch(); tile::grid_wait();"), ("sm_90a", "sm_120a"))


def test_clusters_meet():
    calls = "tile::cluster_arrive_relaxed(); tile::cluster_wait(); tile::cluster_arrive(); tile::cluster_wait();"
    compile_everywhere(KERNEL.replace("CALLS", calls), ("sm_90a", "sm_120a"))


def test_registers_move():
    calls = "if (threadIdx.x < 128) tile::set_registers<240, true>(); else tile::set_registers<24, false>();"
    compile_everywhere(KERNEL.replace("CALLS", calls), ("sm_90a",))
