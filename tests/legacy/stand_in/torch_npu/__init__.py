# SPDX-License-Identifier: Apache-2.0
"""What a script finds as torch_npu where there is no Ascend device: the stand-in of ulpscope.testing."""

from ulpscope.testing import npu

npu.install()
