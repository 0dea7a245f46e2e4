"""The keeper as a Serve deployment, and how a replica of the API calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.replicas import prepare_replica
from deployments.usage.interface import (
    AccountsUnavailableError,
    Balance,
    Refusal,
    Reservation,
    Spent,
    UnknownHolder,
)
from deployments.usage.keeper import AccountKeeper
from deployments.usage.quotas import KeyLimits, Use

ANSWER_WITHIN_S = 10.0
"""In which Serve replaces a keeper that has died."""
RETRY_S = 0.25


class AccountsReplica(AccountKeeper):
    """The one replica that keeps account."""

    def __init__(self, limits: Iterable[KeyLimits]) -> None:
        prepare_replica()
        super().__init__(limits)


class DeployedKeeper:
    """A ``Keeper`` behind a handle. AccountsUnavailableError if it does not answer in time.

    If it dies over a call, the next one is called: reservations have ids, and what else it was told is gone with it.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def reserve(self, asked: Reservation) -> Refusal | UnknownHolder | None:
        """See ``Keeper``."""
        answer: Refusal | UnknownHolder | None = await self._call("reserve", asked)
        return answer

    async def settle(
        self, holder: str, ended: Sequence[str], uses: Mapping[str, Sequence[Spent]]
    ) -> UnknownHolder | None:
        """See ``Keeper``."""
        answer: UnknownHolder | None = await self._call("settle", holder, ended, dict(uses))
        return answer

    async def renew(
        self, holder: str, under_way: Sequence[Reservation], asked: Sequence[str], latest: Mapping[str, Sequence[Use]]
    ) -> bool:
        """See ``Keeper``."""
        is_new: bool = await self._call("renew", holder, under_way, asked, latest)
        return is_new

    async def used(self, key: str) -> Balance:
        """See ``Keeper``."""
        usage: Balance = await self._call("used", key)
        return usage

    async def _call(self, method: str, *args: Any) -> Any:
        give_up_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + give_up_s - time.monotonic()):
                    return await getattr(self._handle, method).remote(*args)
            except (RayActorError, DeploymentUnavailableError, TimeoutError) as error:
                if time.monotonic() + RETRY_S > give_up_s:
                    raise AccountsUnavailableError("nobody says now what this key may have; try again") from error
            await asyncio.sleep(RETRY_S)
