# SPDX-License-Identifier: Apache-2.0
"""The published standards as tables: limits, ratios and which call is judged by which standard, each with its source.

docs/standards.md shows the same numbers; a test keeps them equal. Nothing here is ours: where a document and the code that came with
it disagree, the document is followed and the page says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ulpscope.model.check.standards import Standard, StandardLimits

__all__ = [
    "API_STANDARDS",
    "CHECKER",
    "CHECKER_COSINE",
    "CHECKER_MAX_ABS",
    "EDITIONS",
    "EDITION_2024",
    "RULE_SOURCES",
    "THOUSANDTH",
    "ULP",
    "CheckerLimits",
    "Edition",
    "RatioLimit",
    "UlpLimits",
]


@dataclass(frozen=True, slots=True)
class RatioLimit:
    """The error of one device over that of the other: up to `passed` it passes, up to `warning` it is a warning, beyond it fails."""

    passed: float
    warning: float


@dataclass(frozen=True, slots=True)
class CheckerLimits:
    """Shares of elements within a relative error: at most the first share fails, at most the second is a warning."""

    failed: tuple[str, float]
    warning: tuple[str, float]


@dataclass(frozen=True, slots=True)
class UlpLimits:
    """Any of the three is enough: few elements beyond, a small mean, or fewer beyond than on the other device."""

    beyond: float
    mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One publication of the standards. `floors` keep a ratio from being divided by next to nothing; `levels` name calls with stricter
    ratios. A ratio in `shown` is computed and not counted.
    """

    name: str
    source: str
    limits: dict[str, StandardLimits]
    ratios: dict[str, RatioLimit]
    shown: frozenset[str] = frozenset({"balance"})
    floors: dict[str, float] = field(default_factory=dict)
    levels: dict[str, dict[str, RatioLimit]] = field(default_factory=dict)
    level_of: dict[str, str] = field(default_factory=dict)


CHECKER_COSINE = 0.99
CHECKER_MAX_ABS = 0.001
_HALF = CheckerLimits(("within_1e2", 0.99), ("within_1e3", 0.999))
_SINGLE = CheckerLimits(("within_1e3", 0.999), ("within_1e4", 0.9999))
CHECKER: dict[str, CheckerLimits] = {
    "float8_e4m3fn": _HALF,
    "float8_e5m2": _HALF,
    "float16": _HALF,
    "bfloat16": _HALF,
    "float32": _SINGLE,
    "float64": _SINGLE,
}
"""Decided in this order: integers and booleans equal; cosine above CHECKER_COSINE; largest error below CHECKER_MAX_ABS passes; shares."""

ULP: dict[str, UlpLimits] = {
    "float32": UlpLimits(0.05, mean=64.0),
    "float16": UlpLimits(0.001),
    "bfloat16": UlpLimits(0.001),
    "float8_e4m3fn": UlpLimits(0.001),
    "float8_e5m2": UlpLimits(0.001),
}
THOUSANDTH = 0.999

_UP_TO_TWO = RatioLimit(1.0, 2.0)
_RATIOS_2024 = {
    "small_errors": _UP_TO_TWO,
    "rms_error": _UP_TO_TWO,
    "max_rel": RatioLimit(1.0, 10.0),
    "mean_rel": _UP_TO_TWO,
    "balance": _UP_TO_TWO,
}


def _limits_2024(small_value: float, small_error: float, rtol: float, ulp: float) -> StandardLimits:
    return StandardLimits(small_value=small_value, small_error=small_error, small_atol=small_error, rtol=rtol, ulp=ulp)


_FLOAT8 = StandardLimits(small_value=2.0**-20, small_error=2.0**-30, small_atol=2.0**-30, rtol=2.0**-20, ulp=1.0)  # 26.2's for "others"
EDITION_2024 = Edition(
    name="2024",
    source="msprobe 1.0 (August 2024): PyTorch accuracy checker guide, sections on small values and on api_precision_compare",
    limits={
        "float32": _limits_2024(1e-6, 1e-9, 1e-6, 32.0),
        "float16": _limits_2024(1e-3, 1e-5, 1e-3, 1.0),
        "bfloat16": _limits_2024(1e-3, 1e-5, 4e-3, 1.0),
        "float8_e4m3fn": _FLOAT8,
        "float8_e5m2": _FLOAT8,
    },
    ratios=_RATIOS_2024,
)


def _strict(max_rel: float, others: float) -> dict[str, RatioLimit]:
    """Ratios without warnings: what is beyond fails."""
    return {"max_rel": RatioLimit(max_rel, max_rel), "mean_rel": RatioLimit(others, others), "rms_error": RatioLimit(others, others)}


_L1 = "embedding scatter_ scatter_add_ npu_fusion_attention npu_fusion_attention_grad"
_L2 = """
    addmm matmul mm layer_norm gelu sum index one_hot nonzero
    npu_rms_norm npu_rms_norm_backward npu_cross_entropy_loss npu_cross_entropy_loss_backward
"""
EDITION_26 = Edition(
    name="26.2",
    source="mindstudio-probe 26.2.0: constants of its precision standards",
    limits={
        "float32": StandardLimits(small_value=2.0**-20, small_error=2.0**-30, small_atol=2.0**-30, rtol=2.0**-20, ulp=32.0),
        "float16": StandardLimits(small_value=2.0**-10, small_error=1e-16, small_atol=2.0**-16, rtol=2.0**-10, ulp=1.0),
        "bfloat16": StandardLimits(small_value=2.0**-10, small_error=1e-16, small_atol=1e-16, rtol=2.0**-8, ulp=1.0),
        "float8_e4m3fn": _FLOAT8,
        "float8_e5m2": _FLOAT8,
    },
    ratios={**_strict(10.0, 2.0), "small_errors": RatioLimit(2.0, 2.0), "balance": RatioLimit(2.0, 2.0)},
    floors={"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-14, "": 2.0**-14},
    levels={"L1": _strict(5.0, 1.5), "L2": _strict(2.0, 1.2)},
    level_of={**dict.fromkeys(_L1.split(), "L1"), **dict.fromkeys(_L2.split(), "L2")},
)
EDITIONS: dict[str, Edition] = {edition.name: edition for edition in (EDITION_2024, EDITION_26)}

# The names of the document's list, in-place forms and operators folded into one name: `mul_`, `__mul__` and `__imul__` are `mul`.
_ABSOLUTE = "add div divide leaky_relu mul prelu reciprocal rsqrt rsub square sub"
_BINARY = """
    abs absolute argmin bitwise_and broadcast_to ceil equal fill flatten floor gather greater greater_equal histc isfinite isnan less
    less_equal logical_and logical_not logical_or masked_fill max_pool3d maximum minimum neg nonzero not_equal one_hot pad relu reshape
    round select sign sort tile topk transpose tril triu type_as
"""
_ULP = "addbmm addmm baddbmm bilinear bmm chain_matmul hspmm linear matmul mm mv smm sspaddmm"
_THOUSANDTH = "conv1d conv2d"


def _named(names: str, standard: Standard) -> dict[str, Standard]:
    return dict.fromkeys(names.split(), standard)


API_STANDARDS: dict[str, Standard] = {
    **_named(_ABSOLUTE, "absolute"),
    **_named(_BINARY, "binary"),
    **_named(_ULP, "ulp"),
    **_named(_THOUSANDTH, "thousandth"),
}
"""Which call is judged by which standard; all others by `benchmark`, integers and booleans by `binary`, float8 results by `ulp`."""

_GUIDE = "msprobe accuracy checker guide, 2024"
RULE_SOURCES: dict[Standard, str] = {
    "checker": "api_accuracy_checker README, October 2023 (cosine, double thousandth); its successor's guide, 2024 (pass, warning, error)",
    "benchmark": f"{_GUIDE}: ratios of the errors of two devices",
    "ulp": f"{_GUIDE}: matrix products, by units in the last place",
    "binary": f"{_GUIDE}: results that have to be equal",
    "absolute": f"{_GUIDE}: relative error of normal and absolute error of small values",
    "thousandth": f"{_GUIDE}: convolutions, by the share of elements within a thousandth",
}
