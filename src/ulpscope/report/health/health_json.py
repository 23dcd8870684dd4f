# SPDX-License-Identifier: Apache-2.0
"""Write a health comparison as JSON (docs/health.md). NaN and infinities are texts, as in the comparison of two recordings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ulpscope.model.health import HealthComparison
from ulpscope.report.replacing import replacing

__all__ = ["HEALTH_SCHEMA", "dump_health", "write_health_json"]

HEALTH_SCHEMA = "ulpscope.health/1"


def write_health_json(comparison: HealthComparison, path: Path) -> None:
    """Write the comparison."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        dump_health(comparison, stream)


def dump_health(comparison: HealthComparison, stream: TextIO) -> None:
    """Write the comparison to an open file, one key a line."""
    head = {
        "schema": HEALTH_SCHEMA,
        "verdict": comparison.verdict,
        "parted_at": comparison.parted_at,
        "findings": [asdict(finding) for finding in comparison.findings],
        "departures": [asdict(departure) for departure in comparison.departures],
        "alerts": [asdict(alert) for alert in comparison.alerts],
        "subject": {"path": comparison.subject_path, **asdict(comparison.subject)},
        "reference": {"path": comparison.reference_path, **asdict(comparison.reference)},
        "steps": comparison.steps.tolist(),
        "similarity": dict(zip(comparison.names, comparison.similarity.T.tolist(), strict=True)),
        "log_ratio": dict(zip(comparison.names, comparison.log_ratio.T.tolist(), strict=True)),
        "scalars": {
            "subject": {name: values.tolist() for name, values in comparison.subject_scalars.items()},
            "reference": {name: values.tolist() for name, values in comparison.reference_scalars.items()},
        },
    }
    lines = (f"{json.dumps(key)}: {json.dumps(_plain(value), allow_nan=False)}" for key, value in head.items())
    stream.write("{\n" + ",\n".join(lines) + "\n}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
