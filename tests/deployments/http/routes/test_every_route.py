"""Every route does what the OpenAPI document says: schemathesis finds no 5xx and no undocumented answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import positive_data_acceptance

from pipelines.lora.source import LoraLimits
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

KEY = "key"
DOCUMENT = build(FakeService(), Path("unused")).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    service = FakeService(step_s=0, takes_pictures=True, runtime_loras=LoraLimits())
    with serving(build(service, tmp_path_factory.mktemp("data"), api_keys=(KEY,))) as url:
        yield url


ALL_OF, ONE_IN = 60, 8
"""Number of boundary values of schemathesis that are all sent for an operation, and the step through the others: six
bodies have 8,000. Operations whose bodies have the same fields send different ones."""
OPERATIONS = [f"{method.upper()} {path}" for path, one in DOCUMENT["paths"].items() for method in one]
NUMBERS: Counter[str] = Counter()
"""Boundary values so far, by operation."""
FEW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@schema.parametrize()
@pytest.mark.parametrize("boundaries", ["some", pytest.param("all", marks=pytest.mark.slow)])
@FEW
def test_no_answer_surprises(case: schemathesis.Case[Any], server: str, boundaries: str) -> None:
    """One test serves both: schemathesis makes its 12,000 boundary values for each test function at collection."""
    if boundaries == "all":
        if is_boundary(case):
            call(case, server)
        return
    if is_boundary(case):
        NUMBERS[case.operation.label] += 1
        number = NUMBERS[case.operation.label]
        if number > ALL_OF and (number + OPERATIONS.index(case.operation.label)) % ONE_IN:
            return
    call(case, server)


def is_boundary(case: schemathesis.Case[Any]) -> bool:
    """Return True for a case of schemathesis's phase "coverage": one field at a time has a value of interest."""
    return case.meta is not None and case.meta.phase.name == "coverage"


def call(case: schemathesis.Case[Any], server: str) -> None:
    case.call_and_validate(
        base_url=server,
        headers={"Authorization": f"Bearer {KEY}"},
        # Sizes and steps depend on the model: a documented value may be refused, with a 400 that says why.
        excluded_checks=[positive_data_acceptance],
        timeout=PATIENCE_S,
    )
