"""Partition of a traced forward into a prologue in torch, the core (the future engine), and an epilogue in torch."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx, nn

from engines.core.torch_private import COLLECTIVE_PREFIX
from engines.tensorrt_engine.export.markers import CUT, JOIN
from engines.tensorrt_engine.export.real_numbers import write_complex_as_real
from engines.tensorrt_engine.export.subgraph import extract, input_name, is_size, resolve

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
    """The three parts of a traced forward."""

    prologue: fx.GraphModule
    """``prologue(**inputs, rank_index)`` returns ``prologue_outputs``."""
    core: fx.GraphModule
    """Takes ``core_inputs``, some of the prologue's outputs, in order; returns ``core_outputs``."""
    epilogue: fx.GraphModule
    """Takes ``epilogue_inputs``, outputs of prologue and core; returns the prediction."""
    prologue_outputs: tuple[str, ...]
    """Names of values, in order."""
    core_inputs: tuple[str, ...]
    """Names of values, in order."""
    core_outputs: tuple[str, ...]
    """Names of values, in order."""
    epilogue_inputs: tuple[str, ...]
    """Names of values, in order."""


def partition(traced: fx.GraphModule) -> Parts:
    """Cut ``traced`` (from ``torch.export``, unlifted) at its markers. The core does not depend on the rank."""
    _drop_assertions(traced.graph)
    _drop_noop_squeezes(traced.graph)
    _check_no_regions(traced)
    write_complex_as_real(traced.graph)
    _mark_parameters(traced)
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    prologue = _prologue(nodes)
    epilogue = downstream([node for node in nodes if node.target is JOIN])
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    results = list(result) if isinstance(result, list | tuple) else [result]
    in_torch = prologue | epilogue
    core = [node for node in nodes if node not in in_torch and node.op not in ("placeholder", "get_attr")]
    inputs = [node for node in nodes if node.op == "placeholder"]

    into_core = [node for node in _outside(core) if not is_size(node)]
    core_results = [n for n in core if n in results or any(user in epilogue for user in n.users)]
    into_epilogue = _outside([n for n in nodes if n in epilogue], extra=results)
    prologue_results = list(dict.fromkeys([*into_core, *(n for n in into_epilogue if n not in core)]))
    names = _names(prologue_results)
    return Parts(
        prologue=extract(traced, inputs, [n for n in nodes if n in prologue], prologue_results, rank=True),
        core=extract(traced, into_core, core, core_results),
        epilogue=extract(traced, into_epilogue, [n for n in nodes if n in epilogue], results),
        prologue_outputs=tuple(names[n] for n in prologue_results),
        core_inputs=tuple(names[n] for n in into_core),
        core_outputs=tuple(n.name for n in core_results),
        epilogue_inputs=tuple(names.get(n, n.name) for n in into_epilogue),
    )


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and ("assert" in node.name or "constrain" in node.name):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _drop_noop_squeezes(graph: fx.Graph) -> None:
    """Remove squeezes of dims other than 1, which torch ignores and ONNX rejects."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _packet(node) == "squeeze":
            (source,) = node.all_input_nodes
            if node.meta["val"].ndim == source.meta["val"].ndim:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _check_no_regions(traced: fx.GraphModule) -> None:
    """Raise ValueError for a nested graph in the forward: another autocast, or a condition."""
    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(traced), nn.Module):
            raise ValueError(
                f"the traced forward has a region of its own ({next(iter(node.users)).target}), which no engine "
                "can hold: use engine: torch"
            )


def _mark_parameters(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.meta[_IS_PARAMETER] = isinstance(resolve(traced, str(node.target)), nn.Parameter)


def _prologue(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the cuts, unsupported nodes, their inputs, and nodes that then need neither weights nor exchanges.

    A timestep's sinusoids are thus computed in torch, in any precision of the engine. Trailing views stay in the core:
    its input is one rotary table, not one per block.
    """
    prologue = _upstream([n for n in nodes if n.target is CUT or _is_unsupported(n)])
    for node in nodes:
        is_computed = node.op == "call_function" and not _is_exchange(node)
        if is_computed and all(_is_prologue_input(source, prologue) for source in node.all_input_nodes):
            prologue.add(node)
    for node in reversed(nodes):
        if node in prologue and _is_view(node) and not any(user in prologue for user in node.users):
            prologue.remove(node)
    return prologue


def _is_prologue_input(source: fx.Node, prologue: set[fx.Node]) -> bool:
    """Return whether it is an input, a buffer or computed in torch. Cut tokens are not: they are for the core."""
    if source.op == "get_attr":
        return not source.meta[_IS_PARAMETER]
    return source.op == "placeholder" or (source in prologue and source.target is not CUT)


def _is_unsupported(node: fx.Node) -> bool:
    """Return whether TensorRT has no such operator: float64 arithmetic and ``scatter_add``."""
    return _takes_float64(node) or _packet(node) == "scatter_add"


def _takes_float64(node: fx.Node) -> bool:
    return torch.float64 in (_dtype(node), *(_dtype(source) for source in node.all_input_nodes))


def _is_view(node: fx.Node) -> bool:
    """Return whether it only changes the shape of a tensor that the core supports (no float64)."""
    sources = node.all_input_nodes
    views = len(sources) == 1 and _packet(node) in _VIEWS and _dtype(sources[0]) is not torch.float64
    return views and _dtype(sources[0]) is not None


def _packet(node: fx.Node) -> str:
    return str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""


def _is_exchange(node: fx.Node) -> bool:
    return str(getattr(node.target, "name", lambda: "")()).startswith(COLLECTIVE_PREFIX) or node.target is JOIN


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _upstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return _closure(nodes, lambda n: n.all_input_nodes)


def downstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {n for n in _closure(nodes, lambda n: n.users) if n.op != "output"}


def _closure(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in reached and node.op not in ("placeholder", "get_attr"):
            reached.add(node)
            todo.extend(step(node))
    return reached


def _outside(part: list[fx.Node], extra: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """Return the values that ``part`` takes from outside (except weights), in order of first use."""
    inside = set(part)
    used = [source for node in part for source in node.all_input_nodes] + list(extra)
    return [n for n in dict.fromkeys(used) if n not in inside and n.op != "get_attr"]


def _names(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """Return names of the prologue's outputs: a cut has its input's name, others have their submodule's."""
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
