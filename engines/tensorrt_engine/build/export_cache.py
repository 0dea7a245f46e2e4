"""Exports on disk: made once for all ranks and reused at the next start. Tracing a large model takes minutes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.storage import code_digest, write_atomically
from engines.parallel.mesh import Team
from engines.tensorrt_engine.build.cache_files import get_or_make
from engines.tensorrt_engine.export.archive import read_export, write_export
from engines.tensorrt_engine.export.exported import EngineExport

_PACKAGES = ("torch", "diffusers", "onnx", "onnxscript", "onnx_ir")
"""Packages whose versions affect an export."""


class ExportCache:
    """A folder with one file per export, named by a key of everything that determines it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "exports"

    def get_or_export(
        self, key: str, weights: Mapping[str, Tensor], device: torch.device, export: Callable[[], EngineExport]
    ) -> EngineExport:
        """Return the stored export, or ``export()``'s. One of several concurrent processes exports; the others wait.

        ``weights`` are bound to the parts that run in torch. A damaged file is logged and replaced.
        """
        path = self._folder / f"{key}.zip"

        def read(path: Path) -> EngineExport:
            return read_export(path.read_bytes(), weights, device)

        def make() -> EngineExport:
            write_atomically(path, write_export(export()))
            return read(path)  # the same bytes as the other ranks read

        return get_or_make(path, read, make)


def export_key(model: DenoiserModel, branches: tuple[Branch, ...], team: Team, **options: str) -> str:
    """Return a digest of all that determines an export: model, shapes, division, options, versions, Troupe's code."""
    module = model.modules[branches[0].module]
    facts = {
        "module": repr(module),
        "config": str(getattr(module, "config", "")),
        "tensors": [f"{name} {tuple(x.shape)} {x.dtype} {x.device}" for name, x in module.state_dict().items()],
        "buffers": [f"{name} {_digest(x)}" for name, x in module.named_buffers()],
        "model": f"{model.plan} {model.num_heads} {model.head_dim} {model.forward.__module__}",
        "branches": [_describe(branch) for branch in branches],
        "spec": str(team.spec),
        "options": options,
        "versions": {name: version(name.replace("_", "-")) for name in _PACKAGES},
        "code": [code_digest(name) for name in ("engines", model.forward.__module__.partition(".")[0])],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _describe(branch: Branch) -> str:
    tensors = ((name, x) for name, x in sorted(branch.inputs.items()) if x is not None)
    forms = (f"{name} {tuple(x.shape)} {x.dtype} {x.device}" for name, x in tensors)
    return " ".join((branch.module, str(sorted(branch.constants.items())), *forms))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
