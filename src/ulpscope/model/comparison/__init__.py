# SPDX-License-Identifier: Apache-2.0
"""Define the nouns of a comparison: pairs, measurements, replays, verdicts and the answer."""
