# SPDX-License-Identifier: Apache-2.0
"""Run a kernel tile by tile. The results define the meaning of the kernel."""
