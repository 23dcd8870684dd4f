# SPDX-License-Identifier: Apache-2.0
"""Measure how far two tensors are apart: from their values, else from their statistics, else from their fingerprints."""

from ulpscope.measure.histograms import histograms
from ulpscope.measure.metrics import METRICS, MetricEntry
from ulpscope.measure.slots import measure_slot
from ulpscope.measure.summaries import measure_summaries
from ulpscope.measure.tensors import measure_sums, measure_tensors, with_shape

__all__ = ["METRICS", "MetricEntry", "histograms", "measure_slot", "measure_summaries", "measure_sums", "measure_tensors", "with_shape"]
