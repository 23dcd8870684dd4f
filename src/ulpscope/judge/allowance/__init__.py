# SPDX-License-Identifier: Apache-2.0
"""Say how far apart an honest call may be: what its inputs, sizes and conditioning allow."""
