# SPDX-License-Identifier: Apache-2.0
"""Judge calls that draw random numbers by the distribution that they draw from."""
