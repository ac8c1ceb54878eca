# SPDX-License-Identifier: Apache-2.0
"""Start to compile kernels before Inductor generates the code that calls them."""
