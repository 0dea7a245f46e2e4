"""``troupe doctor``: installed packages, devices, and what can run here or why not."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from deployments.cli.preflight import install_hint
from deployments.cli.tables import print_table
from deployments.config import ServeConfig, ShareConfig
from deployments.model_config import ModelConfig
from deployments.sizing.fit import GIB
from engines.gang.share_group import USABLE

if TYPE_CHECKING:
    from engines.core.model import DenoiserModel


RTX = "tensorrt-rtx-cu13-bindings"
PACKAGES = ("ray", "torch", "diffusers", "transformers", "tensorrt", RTX, "av", "pillow")
EXPORT_PACKAGES = ("onnx", "onnx-ir", "onnxscript", "onnxruntime", "filelock", "sympy")
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    """Subject of the finding."""
    detail: str
    """Result of the check, and the remedy if it is wrong."""
    ok: bool | None = None
    """None for facts without a judgement."""


def print_report(config: str | None = None, *, as_json: bool = False) -> bool:
    """Print all findings. Return whether the CPU path is complete, and ``config`` (any by default) can run."""
    own = _environment() if config is None else _configuration(config)
    findings = [*_software(), *_bytecode(), *_devices(), *_engines(), *_models(), *_privacy(), *own]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        marks = {True: Text("yes", "green"), False: Text("no", "red"), None: Text()}
        print_table(("", "subject", "found"), ((marks[one.ok], one.subject, one.detail) for one in findings))
    needed = ("ray", "torch", "diffusers", *(finding.subject for finding in own))
    return not any(finding.ok is False and finding.subject in needed for finding in findings)


def open_denoiser(source: str, device: str) -> DenoiserModel:
    """Return the model of a ``ModelSource`` on a device."""
    from pipelines.checkpoint import Checkpoint

    return Checkpoint.open(source, device).denoiser()


def first_model(config: str) -> str:
    """Return the source of the first model in ``config``."""
    from deployments.cli.serving import load_config

    return load_config(config).app.models[0].source


def print_proofs(model: str) -> bool:
    """Check each statement about TensorRT engines on this host, and print the results. Return whether none failed."""
    from deployments.settings import process_environment
    from engines.tensorrt_engine.run.doctor import doctor
    from pipelines.loading import resolve_path

    resolve_path(model)  # a wrong name is a user error, not a failed proof
    colours = {"proved": "green", "failed": "red", "not here": "yellow"}
    proofs = doctor(process_environment(), partial(open_denoiser, model))
    rows = ((Text(proof.result, colours[proof.result]), proof.subject, proof.detail) for proof in proofs)
    print_table(("", "statement", "detail"), rows)
    return all(proof.result != "failed" for proof in proofs)


def _software() -> list[Finding]:
    rows = [Finding(subject="Python", detail=platform.python_version())]
    for name in PACKAGES:
        installed = _version(name)
        rows.append(Finding(subject=name, detail=installed or "not installed", ok=installed is not None))
    return rows


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _bytecode() -> list[Finding]:
    """Return whether packages are compiled to bytecode, judged by torch, the largest."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    cached = Path(cache_from_source(spec.origin))  # below sys.pycache_prefix if set
    if os.path.exists(cached):
        return [Finding(subject="bytecode", detail=f"kept, that of torch in {cached.parent}", ok=True)]
    causes, changes = [], []
    if sys.dont_write_bytecode:
        causes.append("Python is told to write none")
        changes.append("unset PYTHONDONTWRITEBYTECODE")
    if not _is_writable(cached.parent):
        causes.append(f"{cached.parent} cannot be written")
        changes.append("set PYTHONPYCACHEPREFIX to a writable folder")
    if not causes:
        return [Finding(subject="bytecode", detail="none yet: the first start writes it", ok=True)]
    detail = f"none, and {' and '.join(causes)}: every start compiles the sources of its packages, about 8 s. "
    detail += f"To change that, {' and '.join(changes)}, or run"
    detail += f" `python -m compileall -q {Path(spec.origin).parents[1]}` once, as where an image is built"
    return [Finding(subject="bytecode", detail=detail, ok=False)]


def _is_writable(folder: Path) -> bool:
    """Return whether ``folder`` can be written, or created."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [
            Finding(subject="GPU", detail="none that torch can use: ranks run on the CPU with Gloo", ok=False),
            Finding(subject="Gloo", detail="in torch", ok=torch.distributed.is_gloo_available()),
        ]
    rows = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        detail = f"{card.name}, {card.total_memory >> 30} GiB, compute capability {card.major}.{card.minor}"
        rows.append(Finding(subject=f"GPU {index}", detail=detail, ok=True))
    return [*rows, _nccl()]


def _nccl() -> Finding:
    import torch

    wheels = [f"{name} {_version(name)}" for name in NCCL_PACKAGES if _version(name)]
    nccl_version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    detail = ".".join(map(str, nccl_version)) + f" in torch; wheels: {', '.join(wheels) or 'none'}"
    return Finding(subject="NCCL", detail=detail, ok=torch.distributed.is_nccl_available())


def _engines() -> list[Finding]:
    import torch

    has_gpu = torch.cuda.is_available()
    rows = [Finding(subject="engine torch", detail="compiled, CUDA graphs" if has_gpu else "eager on the CPU", ok=True)]
    missing = [name for name in EXPORT_PACKAGES if _version(name) is None]
    extra = "export"
    if _version("tensorrt") is None and (has_gpu or _version(RTX) is None):  # RTX builds for GPUs, without one
        missing, extra = ["tensorrt", *missing], "gpu" if has_gpu else "rtx"
    if missing:
        detail = f"needs {', '.join(missing)} ({install_hint(extra)})"
    else:
        detail = "ready" if has_gpu else "builds engines here; running them needs a GPU"
    rows.append(Finding(subject="engine tensorrt", detail=detail, ok=not missing and has_gpu))
    return rows


def _configuration(name: str) -> list[Finding]:
    """Return the problems and warnings of a configuration on this machine. ValueError if it is invalid."""
    from deployments.cli.preflight import problems, warnings
    from deployments.cli.serving import load_config

    config = load_config(name)
    found = list(problems(config))
    slow = [Finding(subject=f"config {name}", detail=f"warning: {warning}") for warning in warnings(config)]
    slow += _sharing(config)
    if found:
        return [*(Finding(subject=f"config {name}", detail=problem, ok=False) for problem in found), *slow]
    return [Finding(subject=f"config {name}", detail="can run here", ok=True), *slow]


def _sharing(config: ServeConfig) -> list[Finding]:
    """Return, for each group of models that share GPUs, which of them fit together and the host memory of all."""
    groups = dict.fromkeys(model.share for model in config.app.models if model.share)
    return [
        Finding(subject=f"share {name}", detail=share_report(config.app.sharing(name), _limits(config, name)))
        for name in groups
    ]


def _limits(config: ServeConfig, name: str) -> ShareConfig:
    """Return the limits of a share group; its memory is a GPU's if the configuration names none."""
    import torch

    limits = config.app.shares.get(name, ShareConfig())
    if limits.memory_gib is not None or not torch.cuda.is_available():
        return limits
    usable = USABLE * torch.cuda.get_device_properties(0).total_memory
    return replace(limits, memory_gib=usable / GIB)


def share_report(models: Sequence[ModelConfig], limits: ShareConfig) -> str:
    """Return which of ``models`` fit together, and where their sleeping weights lie."""
    sizes = {model.name: _shared_memory(model) for model in models}
    total = limits.memory_bytes
    awake = {name: size for name, (size, _) in sizes.items()}
    sets = list(itertools.chain(*(itertools.combinations(awake, num) for num in range(len(awake), 0, -1))))
    fitting = [one for one in sets if total is None or len(one) == 1 or sum(awake[name] for name in one) <= total]
    largest = [one for i, one in enumerate(fitting) if not any(set(one) <= set(other) for other in fitting[:i])]
    host = sum(size for _, size in sizes.values())
    text = f"awake together: {'; or '.join(' + '.join(one) for one in largest)}"
    text += f"; asleep, their weights take up to {host / GIB:.1f} GiB of host memory"
    if (pinned := limits.host_memory_bytes) is not None and pinned < host:
        text += f", of which {limits.host_memory_gib:g} are pinned and the rest is read through the page cache, slower"
    return text


def _shared_memory(model: ModelConfig) -> tuple[int, int]:
    """Return the bytes of a model on its fullest GPU, and those of all its weights, estimated."""
    from deployments.sizing.estimate import PAPER_MACHINE, EstimateOptions, WeightsAlone, make_estimate

    num_ranks = model.denoiser.num_ranks
    dtype = model.dtype if model.dtype != "auto" or model.denoiser.gpus_per_rank else "float32"
    options = EstimateOptions(model=model.source, num_ranks=num_ranks, dtype=dtype, machine=PAPER_MACHINE)
    found = make_estimate(options)
    if isinstance(found, WeightsAlone):
        return found.total_bytes, found.total_bytes
    return found.fit.total_bytes, found.fit.host_bytes


def _privacy() -> list[Finding]:
    """Return whether other users of this machine can read a server's files."""
    from deployments.cli.preflight import open_to_others

    try:
        paths = " ".join(map(str, open_to_others()))
    except ValueError as error:  # there is no home folder
        return [Finding(subject="privacy", detail=str(error), ok=False)]
    if paths:
        detail = (
            f"other users can read {paths}: the next start closes what is this user's, as does `chmod -R go= {paths}`"
        )
        return [Finding(subject="privacy", detail=detail, ok=False)]
    return [Finding(subject="privacy", detail="other users of this machine can read nothing that is kept", ok=True)]


def _environment() -> list[Finding]:
    """Return the faults of this machine and environment that affect every application."""
    from deployments.cli.preflight import environment_problems
    from deployments.cli.serving import load_config

    problems = environment_problems(load_config("laptop"))
    return [Finding(subject="environment", detail=problem, ok=False) for problem in problems]


def _models() -> list[Finding]:
    from pipelines.loading import resolve_path, shipped_checkpoints

    return [Finding(subject=f"model {name}", detail=str(resolve_path(name)), ok=True) for name in shipped_checkpoints()]
