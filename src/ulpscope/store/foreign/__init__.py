# SPDX-License-Identifier: Apache-2.0
"""Read what other tools wrote: msprobe, ptdbg, api_accuracy_checker, torch_npu.hooks."""
