# SPDX-License-Identifier: Apache-2.0
"""Stand in for torchvision, of which there is no build for a CPU torch of this version."""
