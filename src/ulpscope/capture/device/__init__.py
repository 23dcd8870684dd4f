# SPDX-License-Identifier: Apache-2.0
"""Read tensors where they lie, on an accelerator, without waiting for it: kernels, queues and dumps."""
