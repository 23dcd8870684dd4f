# SPDX-License-Identifier: Apache-2.0
"""Translate the doors of four older tools onto capture, check and compare: old words to new words.

Old names, columns, file trees and defaults live here and nowhere else. The distribution `ulpscope-legacy` re-exports these modules under
the names that old scripts import.
"""
