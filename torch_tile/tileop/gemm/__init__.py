# SPDX-License-Identifier: Apache-2.0
"""T.gemm and its implementations: wgmma, mma.sync and fused multiply-adds."""
