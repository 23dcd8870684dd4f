# SPDX-License-Identifier: Apache-2.0
"""Mapping files: globs, one rule a line, and errors that say which line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import InputError
from ulpscope.match import Mapping, read_mapping


@pytest.mark.parametrize(
    ("rule", "name", "renamed"),
    [
        ("layers.* -> h.*", "layers.0.mlp/functional.gelu.1", "h.0.mlp/functional.gelu.1"),
        ("*.attn/* -> *.attention/*", "h.1.attn/torch.matmul.0", "h.1.attention/torch.matmul.0"),
        ("model/torch.add.0 -> net/torch.add.1", "model/torch.add.0", "net/torch.add.1"),
        ("a*b*c -> *", "a1b2c", "1"),
        ("layers.* -> h.*", "blocks.0/torch.add.0", None),
        ("a*a -> b*", "a", None),
        ("*x*y -> *,*", "xy", ","),
    ],
)
def test_stars_capture(rule: str, name: str, renamed: str | None) -> None:
    assert Mapping.parse(rule).rename(name) == renamed


def test_the_first_rule_that_fits_wins_and_comments_are_skipped() -> None:
    mapping = Mapping.parse("# renamed blocks\n\nlayers.0.* -> first.*  # the odd one\nlayers.* -> h.*\n")
    assert mapping.rename("layers.0.w") == "first.w"
    assert mapping.rename("layers.1.w") == "h.1.w"


@given(st.text("ab.*/", min_size=1, max_size=12).filter(lambda text: "->" not in text and text.strip()), st.text("ab./", max_size=30))
def test_a_rule_onto_itself_changes_nothing(glob: str, name: str) -> None:
    assert Mapping.parse(f"{glob} -> {glob}").rename(name) in (None, name)


@pytest.mark.parametrize("line", ["layers.*", "layers.* ->", "-> h.*", "a -> b -> c", "layers.0 -> h.*"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "names.txt"
    file.write_text(f"# names\n{line}\n")
    with pytest.raises(InputError, match=r"names\.txt, line 2: .*'layers\.\* -> h\.\*'"):
        read_mapping(file)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the mapping"):
        read_mapping(tmp_path / "none")
