"""Old spellings answer with the new ones."""

from __future__ import annotations

import pytest

from tests.deployments.support.commands import troupe


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("plan", "--model", "FLUX.1-dev", "--gpus", "4"), "`troupe plan` is called `troupe estimate` now"),
        (("estimate", "--model", "FLUX.1-dev", "--gpus", "4"), "it is called --ranks now"),
        (("models", "--api-key", "secret"), "it is called --api-key-file, or TROUPE_API_KEY outside, now"),
        (("build-engine", "--model", "FLUX.1-dev", "--width", "4"), "it is called --ranks now"),
    ],
)
def test_an_old_spelling_answers_with_the_new_one(arguments: tuple[str, ...], answer: str) -> None:
    result = troupe(*arguments)
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.replace("│", " ").split())


def test_help_shows_new_spellings_alone() -> None:
    assert " plan " not in troupe("--help").stdout
    assert "--gpus" not in troupe("estimate", "--help").stdout
