# SPDX-License-Identifier: Apache-2.0
"""Provide the module that programs find as `torch.npu`: one device, whose streams and events do nothing and whose generator is the CPU's.

The shared generator makes a run on the emulated device bitwise equal to the run on the CPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["build"]


class Stream:
    """A stream on which everything has already run."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("npu", 0)
        self.device_type, self.device_index, self.stream_id = self.device.type, 0, 0

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event that has already been reached."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        self.device = torch.device("npu", 0)

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class device(contextlib.nullcontext[None]):
    """Selects the only device."""

    def __init__(self, index: Any = None) -> None:
        super().__init__()
        set_device(0 if index is None else index)


def set_device(index: Any) -> None:
    number = torch.device(index).index or 0 if not isinstance(index, int) else index
    if number not in (-1, 0):
        raise RuntimeError(f"the emulated npu has one device, npu:0; npu:{number} was asked for")


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    yield


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = "npu") -> None:
    torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def synchronize(device: Any = None) -> None: ...


def empty_cache() -> None: ...


def build() -> types.ModuleType:
    """Build the module that torch registers as `torch.npu`."""
    module = types.ModuleType("torch.npu", "An emulated accelerator; see ulpscope.testing.npu.")
    members: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "device": device,
        "device_count": lambda: 1,
        "empty_cache": empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: "emulated npu",
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "set_device": set_device,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
        "set_stream": lambda stream: None,
        "stream": stream,
        "synchronize": synchronize,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
