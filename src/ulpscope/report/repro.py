# SPDX-License-Identifier: Apache-2.0
"""One recorded call as a short script that runs without us.

A record is data from a file: its names and texts never become code. An operation is written down only where its name is made of
identifiers under a prefix that we know, a value as a literal of a plain type, and any other text in a comment or a literal with control
characters spelled out.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ulpscope.errors import InputError
from ulpscope.model import DTYPES, Arguments, Phase, Slot
from ulpscope.report import repro_script as text
from ulpscope.report.escaping import encodable, shortened

__all__ = ["ReproCall", "ReproYardstick", "file_stem", "readme_text", "script_text"]

_PREFIXES = {
    "torch": "torch",
    "Tensor": "torch.Tensor",
    "functional": "torch.nn.functional",
    "torch.linalg": "torch.linalg",
    "torch.fft": "torch.fft",
    "torch.special": "torch.special",
    "torch._C._nn": "torch._C._nn",
    "VF": "torch",
}
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|ipu|mtia|privateuseone)(:\d{1,4})?")
_MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})
_DEEPEST = 32
_FORMATS = frozenset({"float16", "bfloat16", "tf32"})
_NO_CONTEXT = "contextlib.nullcontext()"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproYardstick:
    """What an honest kernel errs in one result: rms over all elements, and `error` at the place `at`.

    As many elements as `spared` may be infinite or, in integers, flip.
    """

    rms: float = 0.0
    at: tuple[int, ...] | None = None
    error: float = 0.0
    spared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproCall:
    """All that the script of one call is written from.

    `files` names the data of each side and `yardsticks` what honest kernels err, for each version of the inputs. `leaves` are the inputs
    that each gradient sums over, `is_writing` says that the call may write to its arguments, `operands` names the format that a side rounds
    the operands of matrix products to.
    """

    headline: str
    op: str
    arguments: Arguments
    phase: Phase
    files: Mapping[str, Mapping[str, str]]
    yardsticks: Mapping[str, Mapping[Slot, ReproYardstick]]
    limits: tuple[float, float]
    dtype: str
    device: str = "cpu"
    autocast: str | None = None
    deterministic: bool = False
    strides: Mapping[Slot, tuple[int, ...]] = field(default_factory=dict)
    leaves: Mapping[Slot, tuple[Slot, ...]] = field(default_factory=dict)
    mutated: tuple[Slot, ...] = ()
    is_writing: bool = False
    other_arguments: Arguments | None = None
    operands: Mapping[str, str] = field(default_factory=dict)


def file_stem(call: str, index: int) -> str:
    """A name for files, whatever the call is named: `gelu_1`."""
    return f"{re.sub(r'[^A-Za-z0-9_]+', '_', call)[:40].strip('_') or 'call'}_{index}"


def readme_text(headline: str, script: str, rows: str) -> str:
    """Three lines that say what lies here."""
    lines = [
        f"{_shown(headline)}",
        f"Run it with: python {script} (needs torch and safetensors, not ulpscope; --device chooses where, --help says the rest).",
        f"The .safetensors files hold the inputs and what each side recorded; {rows}.",
    ]
    return "\n".join(lines) + "\n"


def script_text(call: ReproCall) -> str:
    """The script; the same call gives the same text."""
    operands = {side: name for side, name in call.operands.items() if name in _FORMATS}
    parts = {
        "HEADLINE": _shown(call.headline),
        "WHAT": _literal(_shown(call.headline)),
        "FILES": _table(call.files),
        "YARDSTICKS": _yardsticks_text(call),
        "LIMITS": _literal(call.limits),
        "DTYPE": _literal(call.dtype),
        "DEVICE": _literal(call.device if _DEVICE.fullmatch(call.device) else "cpu"),
        "TABLES": _tables(call, operands),
        "CALL": _call_text(call.op, call.arguments),
        "OTHER": "" if call.other_arguments is None else text.OTHER,
        "OTHERCALL": "" if call.other_arguments is None else _call_text(call.op, call.other_arguments),
        "NATIVE": f"torch.autocast(device.type, dtype={_dtype(call.autocast)})" if call.autocast else _NO_CONTEXT,
        "EXACT": _exact_context(call.op, operands),
        "LAYOUT": text.LAYOUT if call.strides else "",
        "PLACED": text.PLACED_AS_RECORDED if call.strides else text.PLACED,
        "ROUNDED": text.ROUNDED if operands else "",
        "ROUNDS": "OPERANDS.get(side, ())" if operands else "()",
        "RUN": text.BACKWARD if call.phase == "backward" else text.FORWARD if call.mutated else text.PLAIN,
        "COPY": "leaf.clone()" if call.is_writing else "leaf.view_as(leaf)",
        "ADDED": text.ADDED if call.mutated else "",
        "OWN": "call" if call.other_arguments is None else 'call_of_the_reference if side == "reference" else call',
        "WHOSE": "this call is" if call.other_arguments is None else "the arguments of this call are",
        "REFERENCE": "" if call.other_arguments is None else text.REFERENCE,
    }
    ours = {name: parts[name] for name in ("OTHER", "RUN", "REFERENCE", "LAYOUT", "ROUNDED")}
    return encodable(_filled(_filled(text.FRAME, ours), parts))


def _filled(frame: str, parts: Mapping[str, str]) -> str:
    """The marks replaced in one pass: what a part holds is not looked at again, so foreign text with marks in it stays text."""
    return re.sub(r"@([A-Z]+)@", lambda found: parts.get(found[1], found[0]), frame)


def _tables(call: ReproCall, operands: Mapping[str, str]) -> str:
    """The facts that this call needs and others do not."""
    tables: dict[str, Any] = {"STRIDES": {str(slot): strides for slot, strides in call.strides.items()}}
    if call.phase == "backward":
        tables["LEAVES"] = {str(slot): [str(leaf) for leaf in leaves] for slot, leaves in call.leaves.items()}
    tables["MUTATED"] = {str(Slot("mutated", slot.path)): str(slot) for slot in call.mutated}
    tables["OPERANDS"] = {side: [name] for side, name in operands.items()}
    lines = [f"{name} = {_table(value)}\n" for name, value in tables.items() if value]
    return "".join(lines) + ("torch.use_deterministic_algorithms(True, warn_only=True)\n" if call.deterministic else "")


def _exact_context(op: str, operands: Mapping[str, str]) -> str:
    if operands:
        return f"RoundedOperands(rounded) if rounded else {_NO_CONTEXT}"
    return text.MATH if "attention" in op else _NO_CONTEXT


def _shown(foreign: str) -> str:
    return shortened(encodable(foreign), 400)


def _yardsticks_text(call: ReproCall) -> str:
    lines = []
    for version, slots in call.yardsticks.items():
        entries = {
            str(slot): {"rms": float(f"{one.rms:.6g}"), "at": one.at, "error": float(f"{one.error:.6g}"), "spared": one.spared}
            for slot, one in slots.items()
        }
        lines.append(f"    {_literal(version)}: {_table(entries, 1)},\n")
    return "{\n" + "".join(lines) + "}"


def _table(value: Mapping[Any, Any], depth: int = 0) -> str:
    """A dict with a line for each entry."""
    lines = [f"{'    ' * (depth + 1)}{_literal(key)}: {_literal(item)},\n" for key, item in value.items()]
    return "{\n" + "".join(lines) + "    " * depth + "}"


def _call_text(op: str, arguments: Arguments) -> str:
    head, _, name = op.rpartition(".")
    arguments = _with_eps(name, arguments)
    args = [_value(value, 0) for value in arguments.args]
    if head == "Tensor" and name in _ATTRIBUTES:
        if len(args) != 1:
            raise InputError("an attribute of something else than one tensor")
        return f"{args[0]}.{name}"
    for key, value in (arguments.kwargs or {}).items():
        if not _IDENTIFIER.fullmatch(key) or keyword.iskeyword(key):
            raise InputError(f"a keyword argument is named {_shown(key)!r}")
        if key != "pin_memory":
            args.append(f"{key}={'device' if key == 'device' and value is not None else _value(value, 0)}")
    return f"{_function(op)}({', '.join(args)})"


def _with_eps(name: str, arguments: Arguments) -> Arguments:
    """`rms_norm` takes its default from the dtype, which is another one in float64."""
    given = arguments.kwargs or {}
    if name != "rms_norm" or len(arguments.args) > 3 or given.get("eps") is not None:
        return arguments
    return Arguments(args=arguments.args, kwargs={**given, "eps": 2.0**-23})


def _function(op: str) -> str:
    parts = op.split(".")
    if not all(_IDENTIFIER.fullmatch(part) and not keyword.iskeyword(part) for part in parts):
        raise InputError(f"the name {_shown(op)!r} is not made of identifiers")
    if parts[0] in ("aten", "ops"):
        return ".".join(["torch", "ops", *parts[parts[0] == "ops" :]])
    head = ".".join(parts[:-1])
    if head not in _PREFIXES:
        raise InputError(f"the operation {_shown(op)!r} is not part of torch")
    return f"{_PREFIXES[head]}.{parts[-1]}"


def _value(value: Any, depth: int) -> str:
    if depth > _DEEPEST:
        raise InputError("an argument is nested too deeply")
    match value:
        case str() if value.endswith("…"):
            raise InputError("a long text among the arguments was recorded in part")
        case str() if _DEVICE.fullmatch(value):
            return "str(device)"
        case None | bool() | int() | float() | str():
            return _literal(value)
        case list() | tuple():
            return f"[{', '.join(_value(item, depth + 1) for item in value)}]"
        case dict() if not any(isinstance(key, str) and key.startswith("$") for key in value):
            return f"{{{', '.join(f'{_literal(key)}: {_value(item, depth + 1)}' for key, item in value.items())}}}"
        case dict():
            return _marked(value, depth)
    raise InputError(f"an argument of type {type(value).__name__} cannot be written down")


def _marked(value: dict[str, Any], depth: int) -> str:
    match value:
        case {"$tensor": str(slot)}:
            return f"t[{str(Slot.parse(slot))!r}]"
        case {"$tuple": [*items]}:
            inner = ", ".join(_value(item, depth + 1) for item in items)
            return f"({inner}{',' if len(items) == 1 else ''})"
        case {"$dtype": str(name)}:
            return f"wide({_dtype(name)})"
        case {"$device": str()}:
            return "device"
        case {"$size": [*sizes]}:
            return f"torch.Size({[int(size) for size in sizes]!r})"
        case {"$slice": [start, stop, step]}:
            return f"slice({', '.join(_value(part, depth + 1) for part in (start, stop, step))})"
        case {"$ellipsis": _}:
            return "..."
        case {"$memory_format": str(name)} if name in _MEMORY_FORMATS:
            return f"torch.{name}"
        case {"$layout": "strided"}:
            return "torch.strided"
        case {"$complex": [real, imaginary]}:
            return f"complex({_literal(float(real))}, {_literal(float(imaginary))})"
        case {"$int": str(digits)} if re.fullmatch(r"-?\d{1,64}", digits):
            return str(int(digits))
        case {"$object": "torch._C.Generator"}:
            return "None"
    raise InputError(f"the argument {_shown(str(value))[:60]!r} is not part of the record")


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise InputError(f"the dtype {_shown(name)!r} is not known")
    return f"torch.{name}"


def _literal(value: Any) -> str:
    """Plain values only, NaN and infinities included, in ASCII."""
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float() | str():
            return ascii(value)
        case tuple():
            return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    raise InputError(f"a value of type {type(value).__name__} cannot be written down")
