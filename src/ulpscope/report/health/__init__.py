# SPDX-License-Identifier: Apache-2.0
"""Show a health run, or the step at which two health runs part."""
