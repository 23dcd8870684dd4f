# SPDX-License-Identifier: Apache-2.0
"""Write the names and files of ptdbg's dumps."""
