"""What OpenAI's word ``quality`` means here: a number of steps."""

from __future__ import annotations

from typing import Literal

from pipelines.defaults import Defaults

Quality = Literal["low", "medium", "high"]
WrittenQuality = Literal["auto", "low", "medium", "high", "standard", "hd"]

MEANINGS: dict[WrittenQuality, Quality] = {
    "auto": "medium",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "standard": "medium",
    "hd": "high",
}
SHARES: dict[Quality, float] = {"low": 0.5, "medium": 1.0, "high": 1.5}
"""Steps, as a share of the model's default number."""


def quality_steps(quality: Quality, defaults: Defaults) -> int:
    """Returns the steps that ``quality`` stands for, within the model's limits."""
    return max(defaults.min_steps, min(defaults.max_steps, round(SHARES[quality] * defaults.num_inference_steps)))
