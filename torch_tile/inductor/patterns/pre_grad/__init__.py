# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before autograd traces it."""
