"""An application whose ranks take a known time for each step, however busy the machine's cores are.

A configuration has ``BUILD_APP`` as its ``import_path``. All else of the application is as it is without.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from ray import serve

from deployments import app
from deployments.config import AppConfig
from deployments.stages import denoiser
from deployments.stages.rank import LoadRankParts
from engines.core.engine import RankContext
from engines.gang.gang_config import BuildRank, RankParts

BUILD_APP = f"{__name__}:build_app"
STEP_S = 0.16
"""Seconds of a step's forwards: more than the smallest picture's take on a busy core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadKnownSteps(LoadRankParts):
    """Loads an engine whose ``predict`` waits until ``STEP_S`` are over."""

    def __call__(self, context: RankContext) -> BuildRank:
        return partial(_build, LoadRankParts.__call__(self, context))


def _build(build: BuildRank) -> RankParts:
    parts = build()
    predict = parts.engine.predict

    def slowly(*arguments: Any) -> Any:
        end_s = time.monotonic() + STEP_S
        predictions = predict(*arguments)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return predictions

    parts.engine.predict = slowly  # type: ignore[method-assign, assignment]
    return parts


class Denoiser(denoiser.Denoiser):
    """A replica whose ranks have ``LoadKnownSteps``."""

    async def __init__(self, *arguments: Any) -> None:
        with patch.object(denoiser, "LoadRankParts", LoadKnownSteps):
            await super().__init__(*arguments)


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """See ``deployments.app.build_app``."""
    with patch.object(app, "Denoiser", Denoiser):
        return app.build_app(AppConfig.model_validate(args))
