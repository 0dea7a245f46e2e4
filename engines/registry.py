"""Engines by name, imported at first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from engines.core.engine import Engine, EngineChoice
from engines.core.model import Branch, DenoiserModel

if TYPE_CHECKING:
    from engines.core.engine import Choosing, RankContext


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRow:
    """Import paths ("module:name") of an engine's parts. Only ``load`` needs torch."""

    load: str
    """``(model, context, *, strategy, precision, attention, attentions, options, expected, choosing) -> Engine``."""
    options: str
    """The class of the engine's own options."""
    check: str
    """Raises ValueError for an ``EngineChoice`` that the engine does not support."""
    environment: str | None = None
    """Maps a node's environment variables to those that a rank must be started with in addition."""


ENGINES = {
    "torch": EngineRow(
        load="engines.torch_engine.load:load_torch_engine",
        options="engines.torch_engine.options:TorchOptions",
        check="engines.torch_engine.options:check",
    ),
    "tensorrt": EngineRow(
        load="engines.tensorrt_engine.load:load_tensorrt_engine",
        options="engines.tensorrt_engine.rules:TensorRTOptions",
        check="engines.tensorrt_engine.rules:check",
        environment="engines.tensorrt_engine.run.nccl:rank_environment",
    ),
}


def load_engine(
    name: str,
    model: DenoiserModel,
    context: RankContext,
    *,
    strategy: str = "auto",
    precision: str = "auto",
    attention: str = "auto",
    attentions: tuple[str, ...] = (),
    options: object | None = None,
    expected: Sequence[tuple[Branch, ...]] = (),
    choosing: Choosing | None = None,
) -> Engine:
    """Return the engine of that name, self-checked on every team. Collective over the gang.

    ``attentions`` are further ones that branches may name. ``options`` are the engine's own (None: its defaults),
    ``expected`` are steps in the expected sizes. ``choosing`` are the inputs of an "auto" choice (None: it is predicted
    at each start). Raises ``ValueError`` for an unknown name and for settings that the engine or the model does not
    support.
    """
    row = find_engine(name)
    options = options or _import(row.options)()
    load = _import(row.load)
    settings = {"strategy": strategy, "precision": precision, "attention": attention, "attentions": attentions}
    return cast(Engine, load(model, context, **settings, options=options, expected=expected, choosing=choosing))


def check_engine(name: str, choice: EngineChoice) -> None:
    """Raise ``ValueError`` if the engine of that name does not support ``choice`` for any model."""
    _import(find_engine(name).check)(choice)


def rank_environment(name: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that a rank needs in addition to ``variables``, this node's; empty if none."""
    environment = find_engine(name).environment
    return {} if environment is None else cast("Mapping[str, str]", _import(environment)(variables))


def find_engine(name: str) -> EngineRow:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name]


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
