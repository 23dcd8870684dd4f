# SPDX-License-Identifier: Apache-2.0
"""Write one recorded call as a short script that runs without ulpscope.

A record is data from a file: its names and texts never become code. All of them stand in one place of the script, a literal that holds JSON
in ASCII, and the code refers to them by number. The code itself holds only ulpscope's own words, numbers, and words that torch itself uses:
an operation whose name is made of identifiers under a known prefix, and the parameters and choices listed below.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ulpscope.errors import InputError
from ulpscope.model import DTYPES, Arguments, Phase, Slot
from ulpscope.report.comparison import repro_script as text
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

# Torch's own names of parameters and of choices may stand in the code. Every other name is taken from the literal.
_PARAMETERS = frozenset(
    """
    accumulate align_corners alpha approximate attn_mask beta bias bins ceil_mode chunks copy correction descending device diagonal
    dilation dim dim0 dim1 dims driver dropout_p dtype end eps equal_nan equation exponent fill_value full_matrices generator grid
    groups ignore_index index indexing indices inplace input input1 input2 interpolation is_causal keepdim kernel_size key
    label_smoothing lambd layout left length lower margin mask mat1 mat2 max max_norm mean memory_format min mode momentum
    negative_slope norm norm_type normalized normalized_shape num_classes num_groups offset offsets ord other out out_dtype
    output_padding output_size p pad padding padding_idx padding_mode pos_weight query reduce reduction requires_grad return_indices
    rounding_mode running_mean running_var scale scale_factor self shape size sorted source split_size_or_sections src stable start std
    step steps stride target tensor1 tensor2 tensors threshold training transpose unbiased upper value values vec vec2 weight window x y
    """.split()
)
_CHOICES = frozenset(
    """
    L U add amax amin area backward batchmean bicubic bilinear border circular complete constant floor forward fro ij linear mean mul
    nearest nearest-exact none nuc ortho prod reduced reflect reflection replicate same sum tanh trilinear trunc valid xy zeros
    """.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproYardstick:
    """The error of an honest kernel in one result: rms over all elements, and `error` at the place `at`.

    As many elements as `spared` may be infinite or, in integers, flip.
    """

    rms: float = 0.0
    at: tuple[int, ...] | None = None
    error: float = 0.0
    spared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproCall:
    """Everything that the script of one call is written from.

    `files` names the data of each side, and `yardsticks` holds the error of honest kernels, for each version of the inputs. `leaves` are
    the inputs that each gradient sums over, `is_writing` says that the call may write to its arguments, `operands` names the format that a
    side rounds the operands of matrix products to.
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
    """Make a file name from any call name: `gelu_1`."""
    return f"{re.sub(r'[^A-Za-z0-9_]+', '_', call)[:40].strip('_') or 'call'}_{index}"


def readme_text(headline: str, script: str, rows: str) -> str:
    """Return a README of three lines: the call, how to run the script, and what the data files hold."""
    lines = [
        f"{_shown(headline)}",
        f"Run it with: python {script} (needs torch and safetensors, not ulpscope; --device chooses where, --help says the rest).",
        f"The .safetensors files hold the inputs and what each side recorded; {_shown(rows)}.",
    ]
    return "\n".join(lines) + "\n"


def script_text(call: ReproCall) -> str:
    """Return the script, in ASCII; the same call gives the same text."""
    operands = {side: name for side, name in call.operands.items() if name in _FORMATS}
    code = _Code()
    tables = _tables(call, operands)
    parts = {
        "TABLES": "".join(f'{name.upper()} = FACTS["{name}"]\n' for name in tables) + (text.DETERMINISTIC if call.deterministic else ""),
        "CALL": code.call(call.op, call.arguments),
        "OTHER": "" if call.other_arguments is None else text.OTHER,
        "OTHERCALL": "" if call.other_arguments is None else code.call(call.op, call.other_arguments),
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
    facts = {
        "what": _shown(call.headline),
        "files": call.files,
        "recorded_on": call.device if _DEVICE.fullmatch(call.device) else "cpu",
        "dtype": _shown(call.dtype),
        "limits": call.limits,
        "yardsticks": _yardsticks(call),
        **tables,
        "texts": code.texts,
    }
    ours = {name: parts[name] for name in ("OTHER", "RUN", "REFERENCE", "LAYOUT", "ROUNDED")}
    return _filled(_filled(text.FRAME, ours), {**parts, "FACTS": _json(facts)})


def _json(facts: Mapping[str, Any]) -> str:
    """Return a raw literal that holds JSON in ASCII, a line for each fact; no quote in it can end it."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=True)}" for name, value in facts.items()]
    held = ",\n".join(lines).replace("'", "\\u0027")
    return f"r'''{{\n{held}\n}}'''"


def _filled(frame: str, parts: Mapping[str, str]) -> str:
    """Replace the marks in one pass: a replacement is not searched again, so foreign text with marks in it stays text."""
    return re.sub(r"@([A-Z]+)@", lambda found: parts.get(found[1], found[0]), frame)


def _tables(call: ReproCall, operands: Mapping[str, str]) -> dict[str, Any]:
    """Return the tables that only some calls need."""
    tables: dict[str, Any] = {"strides": {str(slot): strides for slot, strides in call.strides.items()}}
    if call.phase == "backward":
        tables["leaves"] = {str(slot): [str(leaf) for leaf in leaves] for slot, leaves in call.leaves.items()}
    tables["mutated"] = {str(Slot("mutated", slot.path)): str(slot) for slot in call.mutated}
    tables["operands"] = {side: [name] for side, name in operands.items()}
    return {name: value for name, value in tables.items() if value}


def _exact_context(op: str, operands: Mapping[str, str]) -> str:
    if operands:
        return f"RoundedOperands(rounded) if rounded else {_NO_CONTEXT}"
    return text.MATH if "attention" in op else _NO_CONTEXT


def _shown(foreign: str) -> str:
    return shortened(encodable(foreign), 400)


def _yardsticks(call: ReproCall) -> dict[str, dict[str, Any]]:
    return {
        version: {
            str(slot): {"rms": float(f"{one.rms:.6g}"), "at": one.at, "error": float(f"{one.error:.6g}"), "spared": one.spared}
            for slot, one in slots.items()
        }
        for version, slots in call.yardsticks.items()
    }


def _with_eps(name: str, arguments: Arguments) -> Arguments:
    """Pass `rms_norm` its default eps, which torch takes from the dtype: in float64 it would be another one."""
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


class _Code:
    """Writes calls as code; the code names texts by their number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def call(self, op: str, arguments: Arguments) -> str:
        head, _, name = op.rpartition(".")
        arguments = _with_eps(name, arguments)
        args = [self._value(value, 0) for value in arguments.args]
        if head == "Tensor" and name in _ATTRIBUTES:
            if len(args) != 1:
                raise InputError("an attribute of something else than one tensor")
            return f"{args[0]}.{name}"
        for key, value in (arguments.kwargs or {}).items():
            if not _IDENTIFIER.fullmatch(key) or keyword.iskeyword(key):
                raise InputError(f"a keyword argument is named {_shown(key)!r}")
            if key != "pin_memory":
                given = "device" if key == "device" and value is not None else self._value(value, 0)
                args.append(f"{key}={given}" if key in _PARAMETERS else f"**{{{self._text(key)}: {given}}}")
        return f"{_function(op)}({', '.join(args)})"

    def _text(self, foreign: str) -> str:
        """Return the expression that names a text by its place among the facts."""
        if foreign not in self.texts:
            self.texts.append(foreign)
        return f"TEXTS[{self.texts.index(foreign)}]"

    def _value(self, value: Any, depth: int) -> str:
        if depth > _DEEPEST:
            raise InputError("an argument is nested too deeply")
        match value:
            case str() if value.endswith("…"):
                raise InputError("a long text among the arguments was recorded in part")
            case str() if _DEVICE.fullmatch(value):
                return "str(device)"
            case str():
                return repr(value) if value in _CHOICES else self._text(value)
            case None | bool() | int() | float():
                return _number(value)
            case list() | tuple():
                return f"[{', '.join(self._value(item, depth + 1) for item in value)}]"
            case dict() if not any(isinstance(key, str) and key.startswith("$") for key in value):
                pairs = [
                    f"{self._text(key) if isinstance(key, str) else _number(key)}: {self._value(item, depth + 1)}"
                    for key, item in value.items()
                ]
                return f"{{{', '.join(pairs)}}}"
            case dict():
                return self._marked(value, depth)
        raise InputError(f"an argument of type {type(value).__name__} cannot be written down")

    def _marked(self, value: dict[str, Any], depth: int) -> str:
        match value:
            case {"$tensor": str(name)}:
                slot = Slot.parse(name)
                is_ours = all(isinstance(part, int) or part in _PARAMETERS for part in slot.path)
                return f"t[{repr(str(slot)) if is_ours else self._text(str(slot))}]"
            case {"$tuple": [*items]}:
                inner = ", ".join(self._value(item, depth + 1) for item in items)
                return f"({inner}{',' if len(items) == 1 else ''})"
            case {"$dtype": str(name)}:
                return f"wide({_dtype(name)})"
            case {"$device": str()}:
                return "device"
            case {"$size": [*sizes]}:
                return f"torch.Size({[int(size) for size in sizes]!r})"
            case {"$slice": [start, stop, step]}:
                return f"slice({', '.join(self._value(part, depth + 1) for part in (start, stop, step))})"
            case {"$ellipsis": _}:
                return "..."
            case {"$memory_format": str(name)} if name in _MEMORY_FORMATS:
                return f"torch.{name}"
            case {"$layout": "strided"}:
                return "torch.strided"
            case {"$complex": [real, imaginary]}:
                return f"complex({_number(float(real))}, {_number(float(imaginary))})"
            case {"$int": str(digits)} if re.fullmatch(r"-?[0-9]{1,64}", digits):
                return str(int(digits))
            case {"$object": "torch._C.Generator"}:
                return "None"
        raise InputError(f"the argument {_shown(str(value))[:60]!r} is not part of the record")


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise InputError(f"the dtype {_shown(name)!r} is not known")
    return f"torch.{name}"


def _number(value: Any) -> str:
    """Write a value without text in it; NaN and infinities become `float("nan")` and the like."""
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float():
            return repr(value)
    raise InputError(f"a value of type {type(value).__name__} cannot be written down")
