# SPDX-License-Identifier: Apache-2.0
"""Our layers and operators inside models that others wrote."""
