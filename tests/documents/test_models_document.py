"""docs/models.md is what its program writes, and says what the registry knows."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from pipelines.models.registry import ARCHITECTURES
from tests.support.fenced import ROOT

DOCUMENT = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_document", ROOT / ".ci" / "models_document.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date(program: ModuleType) -> None:
    assert DOCUMENT.read_text() == program.text(), "run python .ci/models_document.py"


def test_every_known_class_is_in_it() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in ARCHITECTURES)


def test_proofs_are_found_by_what_tests_build(program: ModuleType) -> None:
    assert "`models/test_gangs.py`" in program.proofs("ZImageTransformer2DModel")
    assert program.proofs("NoSuchTransformer") == ()


def test_it_says_that_licences_differ() -> None:
    assert "Licences differ" in DOCUMENT.read_text()
