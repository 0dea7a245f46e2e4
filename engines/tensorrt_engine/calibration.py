"""Calibration records: the magnitudes of a model's activations, kept under a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.files import write_atomically
from engines.core.model import Branch, DenoiserModel
from engines.quantization.onnx import Kind, Quantization, observed
from engines.tensorrt_engine.export.trace import ChangeModule, unchanged

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 8191
"""Places of values in a sum of theirs are told apart up to this period."""


def fingerprint(module: nn.Module) -> str:
    """A digest of names, shapes, dtypes and of all values: another checkpoint has another one.

    Values go in as sums of their bits, which every device adds up alike, in whatever order.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_bit_sums(tensor.detach())}".encode())
    return digest.hexdigest()[:32]


def _bit_sums(tensor: Tensor) -> list[int]:
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.arange(1, _WEIGHTS + 1, device=bits.device)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for part in torch.split(
        bits, _WEIGHTS << 10
    ):  # a copy in int64 of a whole large tensor would be four times its size
        wide = part.long()
        whole = functional.pad(wide, (0, -len(wide) % _WEIGHTS)).view(-1, _WEIGHTS)
        sums += torch.stack((wide.sum(), (whole.sum(dim=0) * places).sum()))
    return sums.tolist()


def calibrate(model: DenoiserModel, branches: Iterable[Branch], cache_dir: Path) -> dict[str, Path]:
    """Run the unsharded model over ``branches`` (steps of real prompts) and keep what was seen, per module."""
    with calibrating(model, cache_dir) as paths, torch.no_grad():
        for branch in branches:
            model.forward(model.modules[branch.module], branch.inputs)
    return paths


@contextmanager
def calibrating(model: DenoiserModel, cache_dir: Path) -> Iterator[dict[str, Path]]:
    """Keep what the modules see while the unsharded model runs inside; the records' files, by module, at the end."""
    paths: dict[str, Path] = {}
    with ExitStack() as stack:
        records = {name: stack.enter_context(observed(m, model.plan)) for name, m in model.modules.items()}
        yield paths
    for name, record in records.items():
        if record:
            paths[name] = _path(model.modules[name], cache_dir)
            write_atomically(paths[name], json.dumps(record, indent=1).encode())


def quantization(model: DenoiserModel, name: str, precision: str, cache_dir: Path) -> ChangeModule:
    """What the exporter does to module ``name`` for ``precision``. ValueError without a calibration record."""
    if precision not in ("int8", "fp8"):
        return unchanged
    path = _path(model.modules[name], cache_dir)
    if not path.exists():
        raise ValueError(
            f"precision {precision} needs a calibration of these weights, and {path} does not exist: "
            f"run troupe build-engine --precision {precision} --calibrate with this model and dtype first"
        )
    amax: dict[str, float] = json.loads(path.read_text())
    kind: Kind = "int8" if precision == "int8" else "fp8"
    return Quantization(plan=model.plan, amax=amax, kind=kind)


def _path(module: nn.Module, cache_dir: Path) -> Path:
    return cache_dir / "calibration" / f"{fingerprint(module)}.json"
