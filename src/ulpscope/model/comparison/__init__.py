# SPDX-License-Identifier: Apache-2.0
"""Name the nouns of a comparison: pairs, what was measured and replayed of them, what it means, and the answer."""
