"""The keeper as a Serve deployment, and how a replica of the API calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.replicas import prepare_replica
from deployments.usage.keeper import AccountKeeper, AccountsUnavailableError
from deployments.usage.quotas import Account, Balance, KeyLimits, LimitReachedError

ANSWER_WITHIN_S = 10.0
"""Time in which Serve replaces a keeper that has died."""
RETRY_S = 0.25


class AccountsReplica(AccountKeeper):
    """The keeper as a Serve deployment of one replica."""

    def __init__(self, limits: Iterable[KeyLimits]) -> None:
        prepare_replica()
        super().__init__(limits)


class DeployedKeeper:
    """A ``Keeper`` behind a handle. If it dies over a call, the call is repeated with the next one.

    AccountsUnavailableError if there is no answer within ``ANSWER_WITHIN_S``.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def report(self, replica: str, accounts: Mapping[str, Account]) -> Mapping[str, Balance]:
        """See ``Keeper``."""
        balances: Mapping[str, Balance] = await self._call("report", replica, accounts)
        return balances

    async def reserve(
        self, replica: str, key: str, account: Account, reservation: str, num_clips: int
    ) -> LimitReachedError | None:
        """See ``Keeper``."""
        refusal: LimitReachedError | None = await self._call("reserve", replica, key, account, reservation, num_clips)
        return refusal

    async def _call(self, method: str, *args: Any) -> Any:
        give_up_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                async with asyncio.timeout(give_up_s - time.monotonic()):
                    return await getattr(self._handle, method).remote(*args)
            except RayTaskError:  # the keeper's own
                raise
            except (RayError, RayServeException, TimeoutError) as error:
                if time.monotonic() + RETRY_S > give_up_s:
                    raise AccountsUnavailableError(
                        "the limits of this key are unknown for a moment; try again"
                    ) from error
            await asyncio.sleep(RETRY_S)
