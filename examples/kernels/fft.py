# SPDX-License-Identifier: Apache-2.0
"""FFT of rows: Cooley-Tukey in shared memory, one radix-2 stage after the other, real and imaginary parts apart."""

import math

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def fft(X):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    re = T.empty((M, N), "float32")
    im = T.empty((M, N), "float32")
    stages = N.bit_length() - 1  # N is Python's own number while the kernel is traced
    with T.Kernel(M, threads=64) as row:
        a = T.alloc_shared((2, N), "float32")
        b = T.alloc_shared((2, N), "float32")
        for i in T.Parallel(N):
            a[0, i] = X[row, i]
            a[1, i] = 0
        for stage in range_of(stages):  # unrolled by Python: each stage has constants of its own
            old, new = (a, b) if stage % 2 == 0 else (b, a)
            half = 1 << stage
            for i in T.Parallel(N // 2):
                k = i % half
                turn = -math.pi * k / half
                c, s = T.cos(turn), T.sin(turn)
                x_re, x_im = old[0, i], old[1, i]
                y_re, y_im = old[0, i + N // 2], old[1, i + N // 2]
                z_re, z_im = y_re * c - y_im * s, y_re * s + y_im * c
                to = (i - k) * 2 + k
                new[0, to] = x_re + z_re
                new[1, to] = x_im + z_im
                new[0, to + half] = x_re - z_re
                new[1, to + half] = x_im - z_im
        last = a if stages % 2 == 0 else b
        for i in T.Parallel(N):
            re[row, i] = last[0, i]
            im[row, i] = last[1, i]
    return re, im


def range_of(n):
    """A list, which Python loops over while tracing; `range` would be a loop of the device."""
    return list(range(n))


x = torch.randn(5, 256)
re, im = fft(x)
exact = torch.fft.fft(x.double())
torch.testing.assert_close(torch.complex(re, im).to(exact.dtype), exact, rtol=1e-4, atol=1e-4)
print(f"rows  points  error against float64\n{5:4}  {256:6}  {(torch.complex(re, im) - exact).abs().max():.1e}")
