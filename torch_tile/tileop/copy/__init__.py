# SPDX-License-Identifier: Apache-2.0
"""T.copy and its implementations: plain, cp.async, TMA, ldmatrix."""
