# SPDX-License-Identifier: Apache-2.0
"""The parts of the recorder that are compiled: one built with the package, one built by `ulpscope build`."""
