"""Engines by name, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

from engines.core.engine import Engine
from engines.core.model import DenoiserModel

if TYPE_CHECKING:
    from engines.core.rank import RankContext

EngineName = Literal["torch", "tensorrt", "auto"]

ENGINES = {
    "torch": "engines.torch_engine.load:load_torch_engine",
    "tensorrt": "engines.tensorrt_engine.load:load_tensorrt_engine",
    "auto": "engines.torch_engine.load:load_torch_engine",
}
"""Engine to the function that makes one: ``(model, context, *, strategy, precision, ...) -> Engine``."""

ENVIRONMENTS = {"tensorrt": "engines.tensorrt_engine.run.nccl:rank_environment"}
"""Engine to the function that says what its ranks must find in their environment: ``(environment) -> variables``."""


def load_engine(
    name: EngineName,
    model: DenoiserModel,
    context: RankContext,
    *,
    strategy: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Engine:
    """The engine of that name, compared with one rank on every team. All ranks of a gang make the call together.

    ``options`` are those of that engine alone. Raises ``ValueError`` for an unknown name and for options that the
    engine or the model does not allow.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    module, _, function = ENGINES[name].partition(":")
    load = getattr(import_module(module), function)
    return cast(Engine, load(model, context, strategy=strategy, precision=precision, **options))


def rank_environment(name: EngineName, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns variables to start a rank on this node with, whose own are ``environment``; empty if none."""
    if name not in ENVIRONMENTS:
        return {}
    module, _, function = ENVIRONMENTS[name].partition(":")
    return cast("Mapping[str, str]", getattr(import_module(module), function)(environment))
