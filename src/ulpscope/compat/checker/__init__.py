# SPDX-License-Identifier: Apache-2.0
"""Serve scripts of api_accuracy_checker (2023): its dumps, its switches, and the checks over its dumps."""
