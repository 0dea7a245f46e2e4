"""docs/reference/tensorrt.md agrees with the code's refusals and the tests' proofs for each model."""

from __future__ import annotations

import re

import pytest

from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from tests.engines.tensorrt_engine.export.test_diffusers_models import MAKERS, TENSOR_ALONE
from tests.engines.tensorrt_engine.support.cases import KEYS
from tests.support.fenced import ROOT

CASES = {"test_diffusers_models.py": {*MAKERS}, "test_exported.py": {key.family for key in KEYS}}


def rows() -> dict[str, tuple[str, str]]:
    _, _, section = (ROOT / "docs" / "reference" / "tensorrt.md").read_text().partition("\n## Models\n")
    section, _, _ = section.partition("\n## ")
    found = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", section, re.MULTILINE)
    return {name: (engines, proof) for name, engines, proof in found}


def test_every_known_class_has_a_row() -> None:
    assert list(rows()) == sorted(FAMILY_FOLDERS)


@pytest.mark.parametrize("class_name", sorted(FAMILY_FOLDERS))
def test_a_row_says_what_the_code_does(class_name: str) -> None:
    engines, why = rows()[class_name]
    spec = load_spec(class_name)
    if spec.eager_only:
        assert (engines, why) == ("refused", spec.eager_only)
        return
    assert engines.startswith("on one rank, and with `tensor`" if spec.eager_split else "yes")
    file, case = re.findall(r"`(test_\w+\.py)`: (\w+)", f"{engines} {why}")[0]
    assert case in CASES[file]
    assert (case in TENSOR_ALONE) == bool(spec.eager_split)
    assert spec.eager_split in why
