# SPDX-License-Identifier: Apache-2.0
"""Hold the text of a repro script: its frame, and the parts that only some calls need. Marks between @ signs are filled by repro.py.

The second line fixes the encoding, so that no text of a run can change it: Python looks for such a line in the first two.
"""

from __future__ import annotations

__all__ = [
    "ADDED",
    "BACKWARD",
    "DETERMINISTIC",
    "FORWARD",
    "FRAME",
    "LAYOUT",
    "MATH",
    "OTHER",
    "PLACED",
    "PLACED_AS_RECORDED",
    "PLAIN",
    "REFERENCE",
    "ROUNDED",
]

MATH = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
DETERMINISTIC = "torch.use_deterministic_algorithms(True, warn_only=True)\n"
PLACED = "value.to(device, wide(value.dtype), copy=True)"
PLACED_AS_RECORDED = "laid_out(value.to(device, wide(value.dtype), copy=True), STRIDES.get(name))"

PLAIN = """    return named(function(t, device, wide))"""

FORWARD = """    found = named(function(t, device, wide))
    return found | {name: t[source] for name, source in MUTATED.items()}"""

BACKWARD = """    leaves = {name: t[name].requires_grad_() for names in LEAVES.values() for name in names}
    given = t | {name: @COPY@ for name, leaf in leaves.items()}
    found = named(function(given, device, wide))@ADDED@
    made = {name: found.get(name.replace("gradient", "output", 1), found.get(name.replace("gradient", "mutated", 1))) for name in t}
    pairs = [(made[name], t[name]) for name in t if name.startswith("gradient.") and made[name].requires_grad]
    entering = [value.reshape(result.shape).to(result.dtype) for result, value in pairs]
    found = torch.autograd.grad([result for result, _ in pairs], list(leaves.values()), entering, allow_unused=True)
    gradients = {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found)}
    return {result: sum(gradients[name] for name in names) for result, names in LEAVES.items()}"""

ADDED = """
    found |= {name: given[source] for name, source in MUTATED.items()}"""

LAYOUT = '''

def laid_out(value, strides):
    """The tensor as it lay in memory when it was recorded."""
    return value if strides is None else torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
'''

ROUNDED = '''

class RoundedOperands(torch.utils._python_dispatch.TorchDispatchMode):
    """A machine that rounds the operands of matrix products, as the one that recorded does."""

    places = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, 1), "addmm": (1, 2), "addmv": (1, 2)}
    places |= {"baddbmm": (1, 2), "addbmm": (1, 2), "convolution": (0, 1), "_convolution": (0, 1), "convolution_backward": (0, 1, 2)}

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = self.places.get(func._schema.name.rpartition("::")[2], ())
        return func(*(self.round(one) if place in places else one for place, one in enumerate(args)), **(kwargs or {}))

    def round(self, value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if self.name != "tf32":
            return value.float().to(getattr(torch, self.name)).to(value.dtype)
        bits = value.float().contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).to(value.dtype)
'''

OTHER = '''

def call_of_the_reference(t, device, wide):
    """The same with the arguments of the reference."""
    return @OTHERCALL@
'''

REFERENCE = """
            other = results(values, cpu, call_of_the_reference, exact=True)
            what = "the exact result with the reference's arguments, in"
            is_fault |= tell(what, other, exacts, yardsticks, "differs by") and not asked.device"""

FRAME = '''#!/usr/bin/env python3
# -*- coding: utf-8 -*-
"""Runs one recorded call alone: on a device of this machine, and in float64 on the CPU, which is taken for exact.

Says how far what was recorded, and what this machine computes, is from exact, in units of what an honest kernel errs on these inputs.
Exit code 1: something errs by more than any honest kernel does. With --device only what that device computes now decides.
"""

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

# What was recorded, as data. Names and texts of the run stand here and nowhere else.
FACTS = json.loads(@FACTS@)
FILES = FACTS["files"]
DTYPE = FACTS["dtype"]
LIMITS = FACTS["limits"]  # honest kernels stay below these multiples of their usual error: at one place, and rms over all
TEXTS = FACTS["texts"]
@TABLES@

def call(t, device, wide):
    """The call as it was recorded; `wide` makes a dtype that it asks for as wide as its inputs."""
    return @CALL@
@OTHER@

def results(values, device, function=call, exact=False, rounded=None):
    """What the call gives, by slot; `exact` in float64."""
    wide = wider if exact else lambda dtype: dtype
    t = {name: @PLACED@ for name, value in values.items()}
    with @EXACT@ if exact else @NATIVE@:
        return run(function, t, device, wide)


def run(function, t, device, wide):
@RUN@


def wider(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
@LAYOUT@@ROUNDED@

def named(value, path="output"):
    """Tensors inside a result by their slots."""
    if isinstance(value, torch.Tensor):
        return {f"{path}.0" if path == "output" else path: value}
    items = enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {name: tensor for key, item in items for name, tensor in named(item, f"{path}.{key}").items()}


def errs(found, exact, yardstick):
    """How many times what an honest kernel errs, that over its limit, and of what: rms over all, or at the place recorded worst."""
    found = found.detach().cpu()
    exact = exact.detach().reshape(found.shape)
    if not exact.is_floating_point() and not exact.is_complex():
        return (math.inf, math.inf, "") if int((found != exact).sum()) > yardstick["spared"] else (0.0, 0.0, "")
    is_finite = torch.isfinite(exact.to(found.dtype))
    if int((torch.isfinite(found) != is_finite).sum()) > yardstick["spared"]:
        return math.inf, math.inf, ""
    error = (found.to(exact.dtype) - exact).abs().masked_fill(~is_finite, 0.0)
    rms = float(error.square().mean().sqrt()) / (yardstick["rms"] or math.inf)
    ratios = [(rms, rms / LIMITS[1], "rms over these elements")]
    if yardstick["at"] is not None:
        there = float(error[tuple(yardstick["at"])]) / yardstick["error"]
        ratios.append((there, there / LIMITS[0], "the element recorded worst"))
    return max(ratios, key=lambda one: one[1])


def tell(what, found, exacts, yardsticks, errs_by="errs"):
    """Print a line for each result; whether one errs beyond its limit."""
    is_fault = False
    for name, yardstick in yardsticks.items():
        if name not in found:
            continue
        ratio, share, what_of = min((errs(found[name], exact[name], yardstick) for exact in exacts), key=lambda one: one[1])
        is_fault |= share > 1
        times = "beyond all measure" if math.isinf(ratio) else f"{ratio:.3g}x what an honest {DTYPE} kernel errs"
        of_what = f" ({what_of}, {share:.3g}x the limit)" if what_of else ""
        print(f"  {what} {shown(name)} {errs_by} {times}{of_what}{'   <-- too much' if share > 1 else ''}")
    return is_fault


def shown(name):
    """A name with what does not print spelled out."""
    return name if name.isprintable() else ascii(name)[1:-1]


def is_available(device):
    try:
        if device.startswith("npu"):
            __import__("torch_npu")
        return torch.zeros(1, device=device) is not None
    except (RuntimeError, AssertionError, ImportError):
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="judge only what this device computes, as in cuda; by default also what was recorded")
    parser.add_argument("--whole", action="store_true", help="all recorded inputs, where they were kept, and not the shrunk ones")
    asked = parser.parse_args()
    version = "whole" if asked.whole else "small"
    if version not in FILES:
        parser.error("the inputs were not shrunk, or are too large to be kept twice: leave out --whole")
    if asked.device and not is_available(asked.device):
        parser.error(f"there is no device {asked.device} here")
    recorded_on = FACTS["recorded_on"]
    cpu, device = torch.device("cpu"), torch.device(asked.device or (recorded_on if is_available(recorded_on) else "cpu"))
    yardsticks, is_fault = FACTS["yardsticks"][version], False
    sys.stdout.reconfigure(errors="backslashreplace")
    print(FACTS["what"])
    for place, (side, file) in enumerate(FILES[version].items()):
        stored = load_file(Path(__file__).resolve().with_name(file))
        values = {name: value for name, value in stored.items() if not name.startswith("recorded.")}
        recorded = {name.removeprefix("recorded."): value for name, value in stored.items() if name.startswith("recorded.")}
        exacts = [results(values, cpu, @OWN@, exact=True, rounded=one) for one in (None, *@ROUNDS@)]
        is_fault |= tell(f"the {side}'s recorded", recorded, exacts, yardsticks) and not asked.device
        if place == 0:
            is_fault |= tell(f"this machine's kernel ({device}) in", results(values, device), exacts, yardsticks)@REFERENCE@
    whose = f"what {device} computes is" if asked.device else "@WHOSE@"
    print(f"  so {whose} {'' if is_fault else 'not '}at fault: exit code {int(is_fault)}")
    return int(is_fault)


if __name__ == "__main__":
    sys.exit(main())
'''
