"""Division of a peer's step among its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.layout import layout_of
from engines.core.spec import ParallelSpec
from pipelines.directory import read_config
from pipelines.loading import resolve_configuration


@pytest.mark.parametrize(
    ("name", "num_branches", "num_ranks", "expected"),
    [
        ("FLUX.2-dev", 1, 1, {}),
        ("FLUX.2-dev", 1, 4, {"ulysses": 4}),
        ("Z-Image-Turbo", 1, 2, {"ulysses": 2}),
        ("Z-Image-Turbo", 1, 4, {"ulysses": 2, "ring": 2}),  # 30 heads
        ("Qwen-Image", 2, 1, {}),
        ("Qwen-Image", 2, 2, {"guidance": 2}),
        ("Qwen-Image", 2, 4, {"guidance": 2, "ulysses": 2}),
        ("Cosmos3-Nano", 1, 16, {"ulysses": 8, "ring": 2}),  # of 32 heads, eight with keys of their own
    ],
)
def test_branches_come_first_then_heads(name: str, num_branches: int, num_ranks: int, expected: dict[str, Any]) -> None:
    config = read_config(resolve_configuration(name), "transformer")
    layout = layout_of(config, num_branches, num_ranks)
    assert layout == ParallelSpec(**expected)
    assert layout.num_ranks == num_ranks
