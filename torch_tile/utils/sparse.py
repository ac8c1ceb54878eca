# SPDX-License-Identifier: Apache-2.0
"""2:4 sparse matrices for T.gemm_sp: make random ones, and keep them as nonzeros and metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def compress(
    A: torch.Tensor, transposed: bool = False, arch: str | None = None, meta_dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nonzeros (M, K / 2) of a 2:4 sparse matrix (M, K), and the metadata that T.gemm_sp reads.

    Each four neighbours along K have two nonzeros at most; of 32-bit types each two have one. The metadata has the
    layout of mma.sp in the PTX ISA, row by row, four bits a group. Elements are of `meta_dtype` (int16), as those of
    TileLang's compressor since 0.1.14. With `transposed`, A is (K, M) and both results are turned as well. `arch` has
    no effect. Raises ValueError for a matrix that is not sparse so. Raises it, too, if K does not fill whole elements
    of the metadata.
    """
    import torch

    kind = meta_dtype or torch.int16
    dense = (A.mT if transposed else A).contiguous()
    width = 2 if A.element_size() == 4 else 4
    per = torch.iinfo(kind).bits // 4
    rows, columns = dense.shape
    if columns % (width * per):
        raise ValueError(
            f"A has {columns} columns: {kind} of metadata takes a multiple of {width * per}; pad K with zeros"
        )
    groups = dense.reshape(rows, columns // width, width)
    is_kept = groups.to(torch.float64) != 0
    if int(is_kept.sum(-1).max() if is_kept.numel() else 0) > width // 2:
        raise ValueError(
            f"A has more than {width // 2} nonzeros in {width} neighbours along K; set the others to 0 first"
        )
    # Places in order, those of nonzeros first; a group of fewer keeps zeros at its first free places.
    order = (~is_kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., : width // 2].sort(dim=-1).values
    bits = groups.view(torch.uint8).reshape(rows, columns // width, width, A.element_size())
    kept = bits.gather(2, order[..., None].expand(*order.shape, A.element_size()))
    found = kept.reshape(rows, -1).view(A.dtype)
    nibbles = order[..., 0] * 10 + 4 if width == 2 else order[..., 0] | order[..., 1] << 2
    shifts = 4 * torch.arange(per, device=A.device)
    words = (nibbles.reshape(rows, -1, per) << shifts).sum(-1)
    limit = 1 << torch.iinfo(kind).bits
    if torch.iinfo(kind).min < 0:
        words = torch.where(words >= limit // 2, words - limit, words)
    metadata = words.to(kind)
    return (found.mT.contiguous(), metadata.mT.contiguous()) if transposed else (found, metadata)


def randn_semi_sparse(M: int, K: int, dtype: Any = None, device: Any = None, transposed: bool = False) -> torch.Tensor:
    """Return a matrix (M, K), or (K, M) with `transposed`, of normal numbers, 2:4 sparse along K: float16 on the GPU.

    Of 32-bit types, one of each two neighbours is 0. The device is the GPU if there is one.
    """
    import torch

    dtype = dtype or torch.float16
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    width = 2 if dtype.itemsize == 4 else 4
    noise = torch.randn(M, K // width, width, device=device)
    places = torch.rand_like(noise).argsort(-1)
    dense = torch.where(places < width // 2, noise, 0).reshape(M, K).to(dtype)
    return dense.mT.contiguous() if transposed else dense
