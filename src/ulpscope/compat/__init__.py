# SPDX-License-Identifier: Apache-2.0
"""Old words to new words: the doors of four older tools, each a thin translation onto capture, check and compare.

Old names, columns, file trees and defaults live here and nowhere else. The distribution `ulpscope-legacy` re-exports these modules under
the names that old scripts import.
"""
