# SPDX-License-Identifier: Apache-2.0
"""What every front end needs to record a live program, whatever the framework: it imports none."""
