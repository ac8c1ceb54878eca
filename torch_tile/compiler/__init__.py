# SPDX-License-Identifier: Apache-2.0
"""What every compilation needs: its context, the cache of sources, parallel builds and the binding of arguments."""
