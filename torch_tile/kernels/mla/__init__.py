# SPDX-License-Identifier: Apache-2.0
"""Decoding with multi-head latent attention: kernels, schedulers, tilings."""
