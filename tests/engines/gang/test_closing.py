"""What is left of a gang whose end is cut short."""

from __future__ import annotations

import asyncio

import pytest

from engines.gang import gang as gang_module
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from tests.engines.gang.support.set_clock import SetClock, SetRanks, remote, settled


async def test_ranks_end_also_where_nobody_waits_for_them_to_close_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a replica has no more time to stop in."""
    killed = list[object]()
    monkeypatch.setattr(gang_module, "kill_ranks", killed.extend)
    clock = SetClock()
    ranks = SetRanks(2, clock).actors
    ranks[1].close = remote(lambda: asyncio.get_running_loop().create_future())
    gang = Gang(GangConfig(num_ranks=2), ranks, infos=(), team_sizes=(2,), model="cut short", clock=clock)
    closing = asyncio.ensure_future(gang.close())
    await settled()
    assert not killed
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert killed == ranks
