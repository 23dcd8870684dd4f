# SPDX-License-Identifier: Apache-2.0
"""The two drawings of docs/how-it-works.md, held against the folders, the nouns and the import graph."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from grimp import ImportGraph, build_graph

SOURCE = Path(__file__).parents[1] / "src" / "ulpscope"
PAGE = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def picture(name: str) -> str:
    found = re.search(rf"<!-- picture: {name} -->\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found, name
    return found[1]


@cache
def graph() -> ImportGraph:
    return build_graph("ulpscope")


def rows() -> list[list[str]]:
    """The folders of each row, the highest first; a row may go on in lines without a name of their own."""
    found: list[list[str]] = []
    for line in picture("the folders").splitlines():
        folders = re.findall(r"(\w+)/", line)
        if line[:1].strip():
            found.append([])
        if folders:
            found[-1] += folders
    return found


ARROWS = re.findall(r"(?=\b(\w+)/ --(\w+)--> (\w+)/)", picture("the folders"))
STEPS = re.findall(r"^(\S+)\.py (-->|~~>) (\S+)\.py {2,}\S", picture("the life of a call"), re.MULTILINE)


def test_every_folder_stands_in_the_picture() -> None:
    drawn = {folder for row in rows() for folder in row}
    assert drawn == {folder.name for folder in SOURCE.iterdir() if folder.is_dir() and folder.name != "__pycache__"}


def test_a_row_imports_only_what_lies_below_it() -> None:
    height = {folder: number for number, row in enumerate(rows()) for folder in row}
    assert len(set(height.values())) == 4
    stages = set(rows()[2])
    wrong = [
        (importer, imported)
        for importer in graph().modules
        for imported in graph().find_modules_directly_imported_by(importer)
        if (ours := _folder(importer)) in height
        and (theirs := _folder(imported)) in height
        and ours != theirs
        and (height[ours] > height[theirs] or {ours, theirs} <= stages)
    ]
    assert wrong == []


def _folder(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def _names_of(folder: str) -> set[str]:
    """Everything that the files of a folder import from model."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (SOURCE / folder).rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in nodes if (node.module or "").startswith("ulpscope.model") for alias in node.names}


@pytest.mark.parametrize(("maker", "noun", "taker"), ARROWS)
def test_an_arrow_is_a_noun_that_both_ends_know(maker: str, noun: str, taker: str) -> None:
    [file] = (SOURCE / "model").rglob(f"{noun}.py")
    module = ast.parse(file.read_text(encoding="utf-8"))
    nouns = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    assert nouns & _names_of(maker)
    assert nouns & _names_of(taker)


@pytest.mark.parametrize(("caller", "way", "called"), STEPS)
def test_a_call_goes_the_way_that_is_drawn(caller: str, way: str, called: str) -> None:
    importer, imported = (f"ulpscope.{path.replace('/', '.')}" for path in (caller, called))
    assert {importer, imported} <= graph().modules
    assert graph().direct_import_exists(importer=importer, imported=imported) == (way == "-->")
    if way == "~~>":
        assert "FrameSink" in (SOURCE / f"{caller}.py").read_text(encoding="utf-8")
        assert "FrameSink" in (SOURCE / f"{called}.py").read_text(encoding="utf-8")


def test_the_pictures_hold_something() -> None:
    assert len(ARROWS) == 8
    assert len(STEPS) == 9
