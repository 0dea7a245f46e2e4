"""Messages to webhooks: sent until they are received, over restarts, by one replica at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from sqlalchemy import delete, update

from deployments.asyncio_tools import cancel, taken, to_the_end
from deployments.clips.storage import UNAVAILABLE
from deployments.clips.webhooks import WebhookSettings, signature
from deployments.database.database import Database, first_free, row_of
from deployments.database.tables import DeliveryRow

DELAYS_S = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
"""Time after each failed attempt, as the specification proposes; after the last one it is given up."""
ANSWER_WITHIN_S = 15.0
LEASE_S = 60.0
"""Time after which another replica sends what one had begun to send. Clocks of machines must differ by less."""
MAX_RUNNING = 16
KEEP_S = 7 * 86400.0
"""Time for which deliveries that ended are remembered."""
GONE = 410
"""Status by which a receiver says that it wants no more."""

logger = logging.getLogger("troupe.clips")


class WebhookSender:
    """Sends the messages in the database, each by one replica at a time, until it is received or given up."""

    def __init__(self, database: Database, settings: WebhookSettings, poll_s: float) -> None:
        self._database, self._settings, self._poll_s = database, settings, poll_s
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            while True:
                try:
                    while len(self._sending) < MAX_RUNNING and (row := await taken(self._take(), self._give_back)):
                        task = asyncio.create_task(self._deliver(row))
                        self._sending.add(task)
                        task.add_done_callback(self._sending.discard)
                except UNAVAILABLE as error:
                    logger.warning("webhooks wait for the database: %s", error)
                except Exception:  # later ones are to be sent
                    logger.exception("no webhook could be taken")
                await asyncio.sleep(self._poll_s)
        finally:
            await cancel(*self._sending)

    async def sweep(self) -> None:
        """Forget deliveries that ended long ago."""
        async with self._database.engine.begin() as connection:
            await connection.execute(delete(DeliveryRow).where(DeliveryRow.ended_at_s < time.time() - KEEP_S))

    async def _give_back(self, row: DeliveryRow) -> None:
        """Let others send it now: this server ends."""
        await self._write(row, {"not_before_s": time.time(), "attempts": row.attempts - 1})

    async def _take(self) -> DeliveryRow | None:
        now_s = time.time()
        is_due = (DeliveryRow.ended_at_s.is_(None), DeliveryRow.not_before_s <= now_s)
        oldest = first_free(DeliveryRow.id, *is_due, by=DeliveryRow.not_before_s)
        values = {"attempts": DeliveryRow.attempts + 1, "not_before_s": now_s + LEASE_S}
        take = update(DeliveryRow).where(DeliveryRow.id == oldest).values(**values).returning(*DeliveryRow.__table__.c)
        row = await row_of(self._database.engine, take)
        return None if row is None else DeliveryRow(**row._asdict())

    async def _deliver(self, row: DeliveryRow) -> None:
        try:
            problem = await self._problem(row)
        except asyncio.CancelledError:
            await to_the_end(self._give_back(row))
            raise
        fields = {"delivery_id": row.id, "attempt": row.attempts}
        values = {"ended_at_s": time.time()}
        if problem == "":
            logger.info("a webhook was received", extra=fields)
        elif row.attempts > len(DELAYS_S) or problem == str(GONE):
            logger.error("a webhook is given up: %s", problem, extra=fields)
        else:
            logger.warning("a webhook was not received: %s", problem, extra=fields)
            values = {"not_before_s": time.time() + DELAYS_S[row.attempts - 1]}
        await to_the_end(self._write(row, values))

    async def _write(self, row: DeliveryRow, values: dict[str, float]) -> None:
        with suppress(*UNAVAILABLE):  # then it is sent once more
            async with self._database.engine.begin() as connection:
                await connection.execute(update(DeliveryRow).where(DeliveryRow.id == row.id).values(**values))

    async def _problem(self, row: DeliveryRow) -> str:
        """Send the message. Return why it was not received; "" if it was."""
        import httpx

        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                parts, address = await self._settings.resolve(row.url)
            url = httpx.URL(row.url).copy_with(host=address)  # the address that was checked: names may change
            now = int(time.time())
            headers = {
                "Host": parts.netloc,
                "Content-Type": "application/json",
                "webhook-id": row.id,
                "webhook-timestamp": str(now),
                "webhook-signature": signature(row.secret, row.id, now, row.body),
            }
            async with (
                asyncio.timeout(ANSWER_WITHIN_S),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=ANSWER_WITHIN_S) as client,
                client.stream(
                    "POST", url, content=row.body, headers=headers, extensions={"sni_hostname": parts.hostname}
                ) as answer,  # its body is not read
            ):
                return "" if answer.is_success else str(answer.status_code)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a webhook could not be sent", extra={"delivery_id": row.id})
            return f"{type(error).__name__}: {error}"
