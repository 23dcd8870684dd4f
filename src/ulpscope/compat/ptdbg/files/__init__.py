# SPDX-License-Identifier: Apache-2.0
"""The names and files of ptdbg's dumps."""
