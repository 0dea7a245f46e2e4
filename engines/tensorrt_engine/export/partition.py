"""One traced forward, taken apart into what runs in torch before the engine, the engine, and what runs after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx, nn

from engines.tensorrt_engine.export.markers import CUT, JOIN
from engines.tensorrt_engine.export.subgraph import extract, input_name, is_size, resolve

_COLLECTIVE_NAMESPACE = "_c10d_functional::"
_VIEWS = (
    "unsqueeze",
    "squeeze",
    "view",
    "expand",
    "slice",
    "select",
    "transpose",
    "permute",
    "unflatten",
    "split",
    "alias",
)
_IS_PARAMETER = "is_parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """``before(**inputs, rank_index)`` gives ``handed``; ``core`` takes those that ``core_inputs`` names, in order, and
    gives ``core_outputs``; ``after`` takes what ``after_inputs`` names, from both, and gives the prediction.
    """

    before: fx.GraphModule
    core: fx.GraphModule
    after: fx.GraphModule
    handed: tuple[str, ...]
    core_inputs: tuple[str, ...]
    core_outputs: tuple[str, ...]
    after_inputs: tuple[str, ...]


def partition(traced: fx.GraphModule) -> Parts:
    """Cut ``traced`` (of ``torch.export``, unlifted) at its markers. The core never depends on the rank."""
    _drop_assertions(traced.graph)
    _mark_parameters(traced)
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    before = _before(nodes)
    after = downstream([node for node in nodes if node.target is JOIN])
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    results = list(result) if isinstance(result, list | tuple) else [result]
    core = [n for n in nodes if n not in before and n not in after and n.op not in ("placeholder", "get_attr")]
    given = [node for node in nodes if node.op == "placeholder"]

    into_core = [node for node in _outside(core) if not is_size(node)]
    core_results = [n for n in core if n in results or any(user in after for user in n.users)]
    into_after = _outside([n for n in nodes if n in after], extra=results)
    handed = list(dict.fromkeys([*into_core, *(n for n in into_after if n not in core)]))
    names = _names(handed)
    return Parts(
        before=extract(traced, given, [n for n in nodes if n in before], handed, rank=True),
        core=extract(traced, into_core, core, core_results),
        after=extract(traced, into_after, [n for n in nodes if n in after], results),
        handed=tuple(names[n] for n in handed),
        core_inputs=tuple(names[n] for n in into_core),
        core_outputs=tuple(n.name for n in core_results),
        after_inputs=tuple(names.get(n, n.name) for n in into_after),
    )


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and ("assert" in node.name or "constrain" in node.name):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _mark_parameters(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.meta[_IS_PARAMETER] = isinstance(resolve(traced, str(node.target)), nn.Parameter)


def _before(nodes: list[fx.Node]) -> set[fx.Node]:
    """Cuts, float64 arithmetic (TensorRT has none), all they need, and what then needs neither weight nor exchange.

    So the sinusoids of a timestep are computed in torch, whatever the engine's precision. Views at the end go back to
    the core: one rotary table is handed over, not one per block.
    """
    before = _upstream([n for n in nodes if n.target is CUT or _takes_float64(n)])
    for node in nodes:
        if (
            node.op == "call_function"
            and not _is_exchange(node)
            and all(_given(s, before) for s in node.all_input_nodes)
        ):
            before.add(node)
    for node in reversed(nodes):
        if node in before and _is_view(node) and not any(user in before for user in node.users):
            before.remove(node)
    return before


def _given(source: fx.Node, before: set[fx.Node]) -> bool:
    """Inputs, buffers and what torch computed; but no cut tokens, on which the engine's work begins."""
    if source.op == "get_attr":
        return not source.meta[_IS_PARAMETER]
    return source.op == "placeholder" or (source in before and source.target is not CUT)


def _takes_float64(node: fx.Node) -> bool:
    return torch.float64 in (_dtype(node), *(_dtype(source) for source in node.all_input_nodes))


def _is_view(node: fx.Node) -> bool:
    """A change of shape alone, of something the core can take (no float64)."""
    sources = node.all_input_nodes
    views = len(sources) == 1 and _packet(node) in _VIEWS and _dtype(sources[0]) is not torch.float64
    return views and _dtype(sources[0]) is not None


def _packet(node: fx.Node) -> str:
    return str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""


def _is_exchange(node: fx.Node) -> bool:
    return str(getattr(node.target, "name", lambda: "")()).startswith(_COLLECTIVE_NAMESPACE) or node.target is JOIN


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _upstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return _closure(nodes, lambda n: n.all_input_nodes)


def downstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {n for n in _closure(nodes, lambda n: n.users) if n.op != "output"}


def _closure(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen and node.op not in ("placeholder", "get_attr"):
            seen.add(node)
            todo.extend(step(node))
    return seen


def _outside(part: list[fx.Node], extra: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """Values that ``part`` takes from elsewhere (weights excepted), in order of first use."""
    inside = set(part)
    used = [source for node in part for source in node.all_input_nodes] + list(extra)
    return [n for n in dict.fromkeys(used) if n not in inside and n.op != "get_attr"]


def _names(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """Names of values that are handed over: a cut keeps that of what it cuts, others get their submodule's."""
    names: dict[fx.Node, str] = {}
    counts: Counter[str] = Counter()
    for node in nodes:
        source = node.args[0] if node.target is CUT else node
        if isinstance(source, fx.Node) and source.op == "placeholder":
            names[node] = input_name(source)
            continue
        place = _submodule(node)
        names[node] = f"{place}.{counts[place]}"
        counts[place] += 1
    return names


def _submodule(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
    place = str(stack[-1][0]).removeprefix("module").strip(".")
    return place if place and not place.startswith("_") else "value"
