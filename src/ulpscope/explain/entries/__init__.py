# SPDX-License-Identifier: Apache-2.0
"""Explain what entered: batches, parameters, replicas and values that no recorded call made."""
