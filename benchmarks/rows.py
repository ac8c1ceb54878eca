# SPDX-License-Identifier: Apache-2.0
"""Norms and softmax against torch, in bytes read and written.

`python benchmarks/rows.py [--only NAME] [--seconds S]`
"""

from functools import partial

import torch
import torch.nn.functional as F
from timer import arguments, report

from torch_tile.kernels.norm import layer_norm, rms_norm
from torch_tile.kernels.softmax import softmax

SHAPES = [(1024, 1024), (1, 4096), (4096, 128), (64, 32000)]


def main() -> None:
    options = arguments(__doc__)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, n in SHAPES:
            x, w, b = (torch.randn(s, dtype=dtype) for s in ((rows, n), (n,), (n,)))
            families = {
                "rms_norm": (partial(F.rms_norm, x, (n,), w, 1e-6), partial(rms_norm, x, w, cast_first=False)),
                "layer_norm": (partial(F.layer_norm, x, (n,), w, b), partial(layer_norm, x, w, b)),
                "softmax": (partial(torch.softmax, x, -1), partial(softmax, x)),
            }
            for name, (theirs, ours) in families.items():
                if options.only in name:
                    what = f"{name} {rows}x{n} {str(dtype).removeprefix('torch.')}"
                    report(what, {"torch": theirs, "tile": ours}, 2.0 * x.nbytes, "GB/s", options.seconds)


if __name__ == "__main__":
    main()
