# SPDX-License-Identifier: Apache-2.0
"""Dump under the old import name. As its guide promises, importing it is enough: from here on the iteration asked for is dumped."""

from api_accuracy_checker.dump import dump as dump
from ulpscope.compat.checker.checker_config import msCheckerConfig as msCheckerConfig
from ulpscope.compat.checker.checker_dump import follow_training

follow_training()
