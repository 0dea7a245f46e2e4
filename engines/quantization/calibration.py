"""Fixed activation scales: the largest input magnitude of each layer over some steps, stored in a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor, nn

from engines.core.model import DenoiserModel
from engines.core.shard_plan import ShardPlan
from engines.core.storage import write_atomically
from engines.core.tensors import fingerprint
from engines.quantization.linear import quantizable

Amax = Mapping[str, float]
"""Layer name to the largest magnitude of its input."""


@contextmanager
def recording(module: nn.Module, plan: ShardPlan) -> Iterator[dict[str, float]]:
    """Yield a dict that fills, by layer name, while the (unquantised) module runs in the block.

    A run with an input that is not finite raises ValueError: no scale fits it.
    """
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
        if not math.isfinite(largest):
            raise ValueError(
                f"layer {self._name} was given {largest}, which no scale fits: calibrate in a dtype of a larger range "
                "(bfloat16, float32)"
            )
        self._amax[self._name] = max(largest, self._amax.get(self._name, 0.0))


@contextmanager
def recording_all(model: DenoiserModel) -> Iterator[dict[str, Amax]]:
    """Yield the records of all modules of an unsplit, unquantised model, by module name; filled at the block's end.

    Modules that did not run have none.
    """
    records: dict[str, Amax] = {}
    with ExitStack() as stack:
        running = {name: stack.enter_context(recording(m, model.plan)) for name, m in model.modules.items()}
        yield records
    records.update({name: record for name, record in running.items() if record})


def save_calibration(records: Mapping[str, Amax], path: Path) -> None:
    """Write ``records`` by module name."""
    write_atomically(path, (json.dumps(records, indent=1, sort_keys=True) + "\n").encode())


def load_calibration(path: Path, module: str) -> dict[str, float]:
    """Return the record of one module. ``ValueError`` if the file has none for it, or is not a calibration."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no calibration, which `troupe calibrate` writes: {error}") from error
    if not isinstance(document, dict) or not all(map(_is_record, document.values())):
        raise ValueError(f"{path} is no calibration: it must map module names to layer names to largest magnitudes")
    if module not in document:
        raise ValueError(f"{path} has no scales for {module!r}, only for: {', '.join(document) or 'nothing'}")
    return {str(name): float(value) for name, value in document[module].items()}


def calibration_of(module: nn.Module, folder: Path) -> Path:
    """Return the path in ``folder`` of the calibration for exactly these weights; it need not exist."""
    return folder / "calibration" / f"{fingerprint(module)}.json"


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, int | float) and 0 <= one < math.inf for one in value.values()
    )
