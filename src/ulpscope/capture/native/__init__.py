# SPDX-License-Identifier: Apache-2.0
"""Load the compiled parts of the recorder: one built with the package, one built by `ulpscope build`."""
