"""What a step costs beside another, by its tokens alone: for the order of jobs of which nothing else is known yet."""

from __future__ import annotations

LINEAR_SHARE_TOKENS = 18_000
"""So many tokens spend as much on attention as on linears: 24 h² FLOP a token and layer for these, 4 n h for that, so
n = 6 h, here of a transformer of width 3072. On one H200 steps of FLUX.1-dev took 3.4 times as long at 1024 x 1024
pixels as at 512 x 512, and 6.0 times as long again at 2048 x 2048; with 512 tokens of text this says 3.5 and 5.7."""

TOKENS_PER_S = 40_000
"""A unit more than a speed: what is measured on a machine corrects all estimates by one factor."""


def rough_step_s(num_tokens: float, num_branches: int = 1) -> float:
    """Returns what a step of so many tokens takes on one rank, in seconds up to a factor that all steps share."""
    return num_branches * num_tokens * (1 + num_tokens / LINEAR_SHARE_TOKENS) / TOKENS_PER_S
