# SPDX-License-Identifier: Apache-2.0
"""Passes for sm_90a: warp specialization, TMA, wgmma in flight, clusters, mbarriers."""
