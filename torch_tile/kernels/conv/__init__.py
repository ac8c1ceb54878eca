# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images and videos whose channels are dense, as products of boxes of pixels with the weights."""
