# SPDX-License-Identifier: Apache-2.0
"""A class of Python and its compiled twin have the same interface."""

from __future__ import annotations

import pytest

from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.observing import PythonObserver, RareCalls
from ulpscope.capture.record.taking import PythonTaking, RareTaking

pytestmark = pytest.mark.compiled("recorder")

TWINS = [(PythonTaking, RareTaking, "Reader"), (PythonObserver, RareCalls, "Observer")]


@pytest.mark.parametrize(("python", "rare", "compiled"), TWINS, ids=[name for _, _, name in TWINS])
def test_the_compiled_class_has_what_the_python_class_has(python: type, rare: type, compiled: str) -> None:
    methods = {name for name in vars(python) if not name.startswith("_")} - {"read"}  # of the backward side, which has its own twin
    assert methods <= set(dir(getattr(COMPILED, compiled)))
    assert set(rare.__annotations__) <= set(dir(getattr(COMPILED, compiled)))


@pytest.mark.parametrize(("python", "rare", "compiled"), TWINS, ids=[name for _, _, name in TWINS])
def test_neither_class_does_what_is_rare(python: type, rare: type, compiled: str) -> None:
    own = {name for name in vars(rare) if not name.startswith("__") and callable(vars(rare)[name])} - {"_proto_hook"}
    assert len(own) > 7
    assert not own & set(vars(python))
    assert not own & set(dir(getattr(COMPILED, compiled)))
