# SPDX-License-Identifier: Apache-2.0
from cuda_shim import compile_everywhere


def test_barriers_compile():
    compile_everywhere('#include "sync.h"\nextern "C" __global__ void k() { tile::barrier(); tile::warp_barrier(); }')
