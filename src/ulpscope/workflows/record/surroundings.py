# SPDX-License-Identifier: Apache-2.0
"""Describe the process that makes a run, and name the launch that it belongs to."""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import ulpscope
from ulpscope.errors import CaptureWarning
from ulpscope.model import RunInfo

__all__ = ["describe_process", "describe_run", "launch_name", "launched_as", "listed", "rank_and_world_size", "warn_user"]

# Dumps get mailed: only what changes numerics or tells ranks apart, nothing that may hold a secret.
_ENVIRONMENT = (
    "ASCEND_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HCCL_DETERMINISTIC",
    "LOCAL_RANK",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "WORLD_SIZE",
)
_PACKAGES = ("torch", "torch_npu", "mindspore", "numpy", "triton")


def describe_run(world_size: int, options: dict[str, Any], *, seed: int | None = None) -> RunInfo:
    """Describe the process that makes a run of torch."""
    import torch

    return describe_process(world_size, options, _devices(torch), seed=seed)


def describe_process(world_size: int, options: dict[str, Any], devices: tuple[str, ...], *, seed: int | None = None) -> RunInfo:
    """Versions, devices, command line and an allow-list of environment variables."""
    return RunInfo(
        tool=f"ulpscope {ulpscope.__version__}",
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        command=tuple(sys.argv),
        versions={"python": platform.python_version(), **_versions()},
        devices=devices,
        world_size=world_size,
        options=options,
        seed=seed,
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )


def listed(given: Any) -> list[Any]:
    """Return one thing, several or none as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def warn_user(text: str) -> None:
    """Warn, or print where warnings are errors: a problem here must not stop a training."""
    try:
        warnings.warn(text, CaptureWarning, stacklevel=3)
    except Warning:
        print(text, file=sys.stderr)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            loaded = getattr(sys.modules.get(package), "__version__", None)  # __version__ names the build too
            found[package] = str(loaded or metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return found


def _devices(torch: Any) -> tuple[str, ...]:
    names = [f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        names += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    npu = getattr(torch, "npu", None)
    if npu is not None:
        names.append(f"npu ({npu.device_count()} devices)")
    return tuple(names)


def rank_and_world_size() -> tuple[int, int]:
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return launched_as()


def launched_as() -> tuple[int, int]:
    """Rank and world size as a launcher tells them."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def launch_name(world_size: int) -> str | None:
    """Return a name that the processes of one launch share and no other launch has; None for a process on its own."""
    if world_size <= 1:
        return None
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if elastic != "none":
        return f"{elastic}/{restarts}"
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{platform.node()}/{os.getppid()}/{started}/{restarts}"
