# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.report.escaping import encodable, shortened, visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.1.mlp", "layers.1.mlp"),
        ("größe · 层", "größe · 层"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\x9b0m", "\\x9b0m"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_does_not_print_is_spelled_out(text: str, expected: str) -> None:
    assert visible(text) == expected


@given(st.text(st.characters(exclude_categories=()), max_size=50), st.integers(1, 40))
def test_every_text_becomes_printable_and_short(text: str, limit: int) -> None:
    assert visible(text).isprintable()
    assert shortened(text, limit).isprintable()
    assert encodable(text).encode("utf-8").decode("utf-8") == encodable(text)


def test_a_long_text_is_cut() -> None:
    assert shortened("x" * 10, 4) == "xxx…"
    assert shortened("x" * 4, 4) == "xxxx"
