# SPDX-License-Identifier: Apache-2.0
"""See every call that Python makes into torch: modes, patches, and which module is running."""
