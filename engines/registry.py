"""Engines by name, imported when they are asked for."""

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
    """Where an engine's parts are, as "module:name"; all but ``load`` do without torch.

    ``load`` makes one: ``(model, context, *, strategy, precision, options, expected, choosing) -> Engine``. ``options``
    is the class of its own options, ``check`` raises ValueError for an ``EngineChoice`` that it cannot do,
    ``environment`` gives the variables that its ranks must be started with, from a node's own: ``(variables) ->
    variables``.
    """

    load: str
    options: str
    check: str
    environment: str | None = None


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
    options: object | None = None,
    expected: Sequence[tuple[Branch, ...]] = (),
    choosing: Choosing | None = None,
) -> Engine:
    """The engine of that name, compared with one rank on every team. All ranks of a gang make the call together.

    ``options`` are those of that engine alone (None: its defaults), ``expected`` steps in the sizes that will come.
    ``choosing`` says how what is "auto" is decided, and where that is kept (None: by prediction, at each start).
    Raises ``ValueError`` for an unknown name and for what the engine or the model does not allow.
    """
    row = find_engine(name)
    options = options or _named(row.options)()
    load = _named(row.load)
    asked = {"strategy": strategy, "precision": precision, "options": options}
    return cast(Engine, load(model, context, **asked, expected=expected, choosing=choosing))


def check_engine(name: str, choice: EngineChoice) -> None:
    """Raise ``ValueError`` if the engine of that name cannot do what ``choice`` asks for, whatever the model."""
    _named(find_engine(name).check)(choice)


def rank_environment(name: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables to start a rank on this node with, whose own are ``variables``; empty if none."""
    environment = find_engine(name).environment
    return {} if environment is None else cast("Mapping[str, str]", _named(environment)(variables))


def find_engine(name: str) -> EngineRow:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name]


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
