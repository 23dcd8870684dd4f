# SPDX-License-Identifier: Apache-2.0
"""Build a recorded call again from its record, and run it."""
