# SPDX-License-Identifier: Apache-2.0
"""Things to test with: an emulated accelerator (`npu`), its faults, a demo script and contracts that stores share.

Nothing here is imported by the rest of the package, and importing this folder imports no framework.
"""
