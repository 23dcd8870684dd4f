# SPDX-License-Identifier: Apache-2.0
"""Stand in for the vendor's `torch_npu` package: the device module and a handful of fused operations, by their formulas."""

from __future__ import annotations

import importlib.machinery
import types

import torch
import torch.nn.functional as F

__all__ = ["build"]


def npu_fast_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, value = x.chunk(2, dim)
    return F.silu(gate) * value


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised tensor and the reciprocal root mean square."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd).to(x.dtype) * gamma, rstd


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def npu_format_cast(x: torch.Tensor, acl_format: int) -> torch.Tensor:
    return x


def get_npu_format(x: torch.Tensor) -> int:
    """Return 2, the number of ND, the plain layout."""
    return 2


def build(device_module: types.ModuleType) -> types.ModuleType:
    """Build the module to put in `sys.modules['torch_npu']`."""
    module = types.ModuleType("torch_npu", "A stand-in; see ulpscope.testing.npu.")
    module.__version__ = "0.0.0+emulated"  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.npu = device_module  # type: ignore[attr-defined]
    for function in (npu_fast_gelu, npu_swiglu, npu_rms_norm, npu_rotary_mul, npu_format_cast, get_npu_format):
        function.__module__ = "torch_npu"
        setattr(module, function.__name__, function)
    return module
