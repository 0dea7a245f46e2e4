"""Metrics label keys by the configuration's names or digests, and excess keys as others."""

from __future__ import annotations

from functools import partial

from deployments.observability.metrics import MAX_UNNAMED, OTHERS, KeyNames
from deployments.usage.api_keys import hash_of
from deployments.usage.quotas import KeyLimits, find_limits

NAMED, PLAIN = hash_of("named"), hash_of("plain")


def test_names_are_few() -> None:
    limits = (KeyLimits(key=NAMED[:8], name="service"), KeyLimits(key=PLAIN[:8]), KeyLimits(weight=2))
    names = KeyNames(partial(find_limits, limits))
    assert (names.name_of(NAMED), names.name_of(PLAIN), names.name_of("")) == ("service", PLAIN[:8], "")
    several = {names.name_of(hash_of(str(number))) for number in range(3 * MAX_UNNAMED)}
    assert len(several) == MAX_UNNAMED - 2 + 1
    assert OTHERS in several
    assert names.name_of(PLAIN) == PLAIN[:8], "the first ones stay"
