# SPDX-License-Identifier: Apache-2.0
"""Provide things to test with: an emulated accelerator (`npu`), its faults, a demo script and contracts that stores share.

The rest of the package imports nothing from here, and importing this folder imports no framework.
"""
