"""Fixed activation scales: the largest magnitude that each layer's input had over some steps, kept in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from engines.parallel.shard_plan import ShardPlan
from engines.torch_engine.quantized_linear import quantizable


@contextmanager
def recording(module: nn.Module, plan: ShardPlan) -> Iterator[dict[str, float]]:
    """Yields the dict that fills, by layer name, while the (unquantised) module runs in the body."""
    amax: dict[str, float] = {}
    hooks = [layer.register_forward_pre_hook(_Recorder(amax, name)) for name, layer in quantizable(module, plan)]
    try:
        yield amax
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder:
    def __init__(self, amax: dict[str, float], name: str) -> None:
        self._amax, self._name = amax, name

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        largest = float(arguments[0].detach().abs().amax())
        self._amax[self._name] = max(largest, self._amax.get(self._name, 0.0))


def save_calibration(amax: dict[str, float], path: Path) -> None:
    path.write_text(json.dumps(amax, indent=1, sort_keys=True) + "\n")


def load_calibration(path: Path) -> dict[str, float]:
    """Raises ``ValueError`` if the file is not a table of layer names and positive numbers."""
    table = json.loads(path.read_text())
    if not isinstance(table, dict) or not all(
        isinstance(value, int | float) and value >= 0 for value in table.values()
    ):
        raise ValueError(f"{path} is no calibration: it must map layer names to largest magnitudes")
    return {str(name): float(value) for name, value in table.items()}
