"""The actor of one share group: it holds the GPUs' placement group, and says which models are awake.

It is detached and restarts when it dies; its members then report to the new process. It ends itself when no member has
reported for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from deployments.config import ShareConfig
from deployments.model_config import ModelConfig
from engines.gang.placement import shared_bundles
from engines.gang.share_group import GANG, SILENT_S, ShareGroup, ShareOrder, ShareReport

NAMESPACE = "troupe"
POLL_S, FORESEE_EVERY_S = 2.0, 0.5
"""Longest time until a report is answered: in general, and that of a sleeping gang while a model works.

A gang predicts with the wake-up that the last answer foresees.
"""
UNUSED_S = 3.0
"""Time without members after which the actor ends and frees the GPUs."""
GATHER_S = 5.0
"""Time in which all members report to an actor that was restarted. It lets no model onto the GPUs before."""

logger = logging.getLogger("troupe.sharing")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareSpec:
    """A share group and its models."""

    name: str
    """Name of the group, unique in the application."""
    config: ShareConfig
    """GPUs and limits of the share."""
    models: tuple[ModelConfig, ...]
    """The models that take turns."""

    @property
    def actor_name(self) -> str:
        """A name that differs from that of a group with other bundles or limits."""
        gangs = [(model.name, model.denoiser.num_ranks, self.rank_gpus(model)) for model in self.models]
        digest = hashlib.sha256(repr((self.config, gangs, self.bundles)).encode()).hexdigest()[:12]
        return f"troupe-share-{self.name}-{digest}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        return shared_bundles([model.denoiser for model in self.models])

    def rank_gpus(self, model: ModelConfig) -> float:
        """Return the part of a GPU that a rank of ``model`` asks Ray for, in ten thousandths as Ray counts."""
        return int(1e4 * model.denoiser.gpus_per_rank / len(self.models)) / 1e4


class ShareActor:
    """Answers reports once the sender's order differs from its state, or after ``POLL_S``."""

    def __init__(self, spec: ShareSpec) -> None:
        from deployments.replicas import prepare_replica  # ranks import this module without Ray Serve

        prepare_replica()
        self._spec, config = spec, spec.config
        self._used_s = time.monotonic()
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._group = ShareGroup(
            memory_bytes=config.memory_bytes,
            host_bytes=config.host_memory_bytes,
            quiet_until_s=self._used_s + GATHER_S if is_restarted else -math.inf,
        )
        self._num_waiting = 0
        """Calls that wait for the placement group."""
        self._changed = asyncio.Event()
        self._newest: dict[str, ShareReport] = {}
        """Reports that wait for an answer, by token."""
        self._watch: asyncio.Task[None] | None = None
        if is_restarted:  # perhaps no member is left to call it
            self._used_s += SILENT_S
            self._watch = asyncio.create_task(self._end_when_unused())

    async def bundles(self) -> PlacementGroup:
        """Return the placement group of all gangs, once Ray has reserved it."""
        self._watch = self._watch or asyncio.create_task(self._end_when_unused())
        self._num_waiting += 1
        try:
            group = self._bundles()
            await group.ready()
        finally:
            self._num_waiting -= 1
            self._used_s = time.monotonic()
        return group

    def _bundles(self) -> PlacementGroup:
        """Return the group of an actor before this one if there is one. It is detached: gangs outlive this process."""
        name = self._spec.actor_name
        try:
            found: PlacementGroup = get_placement_group(name)
            return found
        except ValueError:
            made: PlacementGroup = placement_group(
                self._spec.bundles, strategy="STRICT_PACK", name=name, lifetime="detached"
            )
            return made

    async def exchange(self, report: ShareReport) -> ShareOrder:
        """Take note of ``report`` and return an order. A newer report of the same process ends the wait."""
        self._watch = self._watch or asyncio.create_task(self._end_when_unused())
        begun_s, self._newest[report.token] = time.monotonic(), report
        try:
            order = self._group.hear(report, begun_s)
            self._notify()
            while order.state == report.state and self._newest.get(report.token) is report:
                now_s, end_s = time.monotonic(), begun_s + self._poll_s(report)
                if now_s >= end_s:
                    break
                next_s = self._group.next_s(now_s)
                await self._wait(min(end_s - now_s, POLL_S if next_s is None else max(0.01, next_s)))
                self._group.settle(time.monotonic())
                order = self._group.order(report, time.monotonic())
            return order
        finally:
            if self._newest.get(report.token) is report:
                del self._newest[report.token]

    def _poll_s(self, report: ShareReport) -> float:
        foresees = report.stage == GANG and report.state == "asleep" and self._group.has_work
        return FORESEE_EVERY_S if foresees else POLL_S

    async def grant(self, token: str, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """See ``ShareGroup.grant``."""
        return self._group.grant(token, sizes)

    async def leave(self, token: str) -> None:
        """Forget a process that ends."""
        self._newest.pop(token, None)
        self._group.forget(token, time.monotonic())
        self._notify()

    async def status(self) -> dict[str, Any]:
        """Return the awake models and the granted host memory."""
        return {"awake": self._group.awake, "pinned_bytes": self._group.pinned_bytes}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    async def _end_when_unused(self) -> None:
        while True:
            await self._wait_until_unused()
            logger.info("no model uses the share group any more", extra={"share": self._spec.name})
            try:
                with suppress(ValueError):  # there is none
                    remove_placement_group(get_placement_group(self._spec.actor_name))
                ray.kill(ray.get_runtime_context().current_actor)
                return
            except Exception:  # Ray's head may be away for a while
                logger.exception("a share group could not be freed", extra={"share": self._spec.name})
            self._used_s = time.monotonic()

    async def _wait_until_unused(self) -> None:
        while time.monotonic() - self._used_s < UNUSED_S:
            await asyncio.sleep(UNUSED_S / 4)
            self._group.settle(time.monotonic())
            if self._num_waiting or not self._group.is_empty:
                self._used_s = time.monotonic()


def share_actor(spec: ShareSpec) -> Any:
    """Return the handle of the group's actor, started if needed."""
    actor: Any = ray.remote(max_restarts=-1, max_concurrency=1000, num_cpus=0)(ShareActor)  # type: ignore[call-overload]
    name = spec.actor_name
    return actor.options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True).remote(spec)
