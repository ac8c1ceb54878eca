# SPDX-License-Identifier: Apache-2.0
"""All families, or some: `python -m benchmarks [gemm grouped dequant attention serving mla norm loss routing scan]
[--quick] [--only M5,V0] [--json FILE]`.

`python -m benchmarks.report FILE...` makes a table and a roofline of what `--json` wrote. On a machine without a GPU
the problems are small ones for the CPU.
"""

import sys

from benchmarks.runner import FAMILIES, main

if __name__ == "__main__":
    sys.exit(main(FAMILIES, __doc__))
