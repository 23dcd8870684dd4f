# SPDX-License-Identifier: Apache-2.0
"""Import `distributions`, which needs NumPy, only when it is called: a comparison without a fault saves that import."""

from __future__ import annotations

from ulpscope.model import Histogram, TensorData

__all__ = ["histograms"]


def histograms(subject: TensorData, reference: TensorData, bins: int = 60) -> tuple[Histogram, ...]:
    """Count subject and reference over the same edges, and their difference where the shapes are the same."""
    from ulpscope.measure.distributions import distributions

    return distributions(subject, reference, bins)
