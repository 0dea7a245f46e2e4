"""The runner of batches, with requests that a test answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deployments.asyncio_tools import cancel
from deployments.batches import runner as runner_module
from deployments.batches.contents import Contents
from deployments.batches.records import BatchRecord, BatchStore
from deployments.batches.runner import BatchRunner
from deployments.database.database import Database
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
LINE = b'{"custom_id": "%d", "method": "POST", "url": "/v1/images/generations", "body": {}}\n'


class Batches:
    """Batches in a database, and the requests that were sent for each key."""

    def __init__(self, store: BatchStore, contents: Contents) -> None:
        self.store, self.contents = store, contents
        self.statuses: dict[str, int] = {}
        """Status of the answers to a key's requests; 200 by default."""
        self.sent: list[str] = []
        self.runner = BatchRunner(store, contents, self.send, poll_s=0.01)

    async def send(
        self, path: str, key_hash: str, body: Mapping[str, Any], idempotency_key: str
    ) -> tuple[int, Mapping[str, str], Any]:
        self.sent.append(key_hash)
        return self.statuses.get(key_hash, 200), {"retry-after": "0.01"}, {}

    async def add(self, name: str, key: str, num_lines: int = 1) -> None:
        self.contents.write(f"file-{name}", b"".join(LINE % i for i in range(num_lines)))
        batch = BatchRecord(id=name, endpoint=IMAGES, input_file_id=f"file-{name}", created_at=0, expires_at=1 << 40)
        await self.store.add(batch, key)

    async def get(self, name: str) -> BatchRecord:
        batch = await self.store.get(name, None)
        assert batch is not None
        return batch

    async def reach(self, name: str, status: str) -> BatchRecord:
        async with asyncio.timeout(PATIENCE_S):
            while (batch := await self.get(name)).status != status:
                await asyncio.sleep(0.01)
        return batch


@pytest.fixture
async def batches(database_url: str, tmp_path: Path) -> AsyncIterator[Batches]:
    database = Database(database_url)
    await database.open()
    yield Batches(BatchStore(database=database, lease_s=60.0), Contents(root=tmp_path / "batches"))
    await database.close()


async def test_a_batch_without_room_leaves_its_turn_to_the_next(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key at its limit would delay the batches of all others for a day."""
    monkeypatch.setattr(runner_module, "TURN_S", 0.05)
    batches.statuses["full"] = 429
    for name, key in (("batch_1", "full"), ("batch_2", "free"), ("batch_3", "free")):
        await batches.add(name, key, num_lines=9)
    running = asyncio.create_task(batches.runner.run())
    await batches.reach("batch_2", "completed")
    await batches.reach("batch_3", "completed")
    assert (await batches.get("batch_1")).is_open
    batches.statuses.clear()
    assert (await batches.reach("batch_1", "completed")).num_completed == 9
    await cancel(running)


async def test_batches_have_their_turns_in_the_order_in_which_they_wait(batches: Batches) -> None:
    for number in range(1, 4):
        await batches.add(f"batch_{number}", "")
    first = await batches.store.take()
    assert first is not None
    await batches.store.give_back(first)
    again = await batches.store.take()
    assert again is not None
    assert (first.batch.id, again.batch.id) == ("batch_1", "batch_1"), "its server ended"
    await batches.store.give_back(again, is_last=True)
    order = [await batches.store.take() for _ in range(3)]
    assert [claim and claim.batch.id for claim in order] == ["batch_2", "batch_3", "batch_1"]
    assert not await batches.store.is_any_free()


async def test_an_answer_that_is_being_written_at_the_end_is_kept(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread goes on."""
    write, begun, go_on = Contents.write, threading.Event(), threading.Event()

    def write_late(contents: Contents, name: str, data: bytes) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        write(contents, name, data)

    await batches.add("batch_1", "")
    monkeypatch.setattr(Contents, "write", write_late)
    running = asyncio.create_task(batches.runner.run())
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    await batches.store.cancel("batch_1")
    await asyncio.sleep(0.1)  # several looks at the record
    go_on.set()
    batch = await batches.reach("batch_1", "cancelled")
    assert batch.num_completed == 1
    assert batch.output_file_id is not None
    content = batches.contents.read(batch.output_file_id)
    assert content is not None
    assert json.loads(content)["custom_id"] == "0"
    await cancel(running)
