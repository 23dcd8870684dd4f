# SPDX-License-Identifier: Apache-2.0
"""Read the dump files of Ascend's runtime (ACL) without CANN."""
