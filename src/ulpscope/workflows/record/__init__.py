# SPDX-License-Identifier: Apache-2.0
"""Record a program: `Capture`, and scripts run unchanged under it."""
