"""Requests have owners by their shares, and the server gets the owners' keys and weights."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from benchmarks.load.mix import OWNERS, Owner, Owners, load_mix, load_owners, owned, poisson
from benchmarks.serving.application import key_variables
from deployments.cli.serving import load_config
from deployments.settings import Settings
from deployments.usage.api_keys import hash_of
from deployments.usage.quotas import find_limits


@pytest.mark.parametrize("name", [file.stem for file in OWNERS.glob("*.yaml")])
def test_owners_that_lie_there_are_read(name: str) -> None:
    assert len({one.weight for one in load_owners(name).owners}) > 1, "with one weight, no owner has more"


def test_owners_change_no_arrival() -> None:
    arrivals, owners = poisson(load_mix("laptop"), 20.0, 100.0, seed=1), load_owners("three")
    found = owned(arrivals, owners, seed=1)
    assert [(one.at_s, one.kind, one.seed) for one in found] == [(one.at_s, one.kind, one.seed) for one in arrivals]
    counted = Counter(one.owner.name for one in found if one.owner is not None)
    assert counted["greedy"] == pytest.approx(0.7 * len(arrivals), rel=0.05)
    assert found == owned(arrivals, owners, seed=1) != owned(arrivals, owners, seed=2)
    assert owned(arrivals, load_owners("none"), seed=1) == arrivals


def test_a_server_knows_keys_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Owners(owners=(Owner(name="a", weight=3), Owner(name="b")))
    for name, value in key_variables(owners.keys).items():
        monkeypatch.setenv(name, value)
    ring, limits = Settings().key_ring(), owners.with_weights(load_config("laptop")).app.api.key_limits
    for one in owners.owners:
        _, _, sent = one.headers["Authorization"].partition(" ")
        assert ring.find(sent) == hash_of(one.key)
        assert find_limits(limits, hash_of(sent)).weight == one.weight
    assert owners.headers == owners.owners[0].headers


def test_nobody_is_asked_for_no_key() -> None:
    nobody = load_owners("none")
    assert (nobody.headers, key_variables(nobody.keys)) == ({}, {})
    assert nobody.with_weights(load_config("laptop")) == load_config("laptop")


def test_wrong_owners_are_refused() -> None:
    one = {"name": "a"}
    for owners in ([one, one], [{**one, "weight": 0}], [{**one, "share": 0}], [{"name": "A B"}]):
        with pytest.raises(ValidationError):
            Owners.model_validate({"owners": owners})
    with pytest.raises(ValueError, match="known: none, three"):
        load_owners("nothing")
