"""A traced graph as the program that ``torch.onnx`` translates, without tracing it again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree


def program_of(core: fx.GraphModule, examples: tuple[Tensor, ...]) -> ExportedProgram:
    """Returns ``core``, of fixed sizes, with its weights and buffers as inputs of the graph before its own.

    ``examples`` are inputs of its sizes.
    """
    tensors = dict([*core.named_parameters(remove_duplicate=False), *core.named_buffers(remove_duplicate=False)])
    graph, specs = _lifted(core, tensors, examples)
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    outputs = [TensorArgument(name=node.name) for node in results]
    given = [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]
    call = ModuleCallSignature(
        inputs=given,
        outputs=list(outputs),
        in_spec=pytree.tree_structure((examples, {})),
        out_spec=pytree.tree_structure(tuple(outputs)),
        forward_arg_names=[node.name for node in core.graph.nodes if node.op == "placeholder"],
    )
    return ExportedProgram(
        root=nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(
            input_specs=specs,
            output_specs=[OutputSpec(kind=OutputKind.USER_OUTPUT, arg=output, target=None) for output in outputs],
        ),
        state_dict=tensors,
        range_constraints={},
        module_call_graph=[ModuleCallEntry(fqn="", signature=call)],
        example_inputs=(examples, {}),
    )


def _lifted(
    core: fx.GraphModule, tensors: Mapping[str, Tensor], examples: tuple[Tensor, ...]
) -> tuple[fx.Graph, list[InputSpec]]:
    """Returns ``core``'s graph with ``tensors`` as its first inputs, and what each input is."""
    mode = detect_fake_mode([node.meta.get("val") for node in core.graph.nodes])
    assert mode is not None
    graph, specs = fx.Graph(), list[InputSpec]()
    lifted: dict[str, fx.Node] = {}
    for name, tensor in tensors.items():
        is_weight = isinstance(tensor, nn.Parameter)
        lifted[name] = graph.placeholder(f"{'p' if is_weight else 'b'}_{name.replace('.', '_')}")
        lifted[name].meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        kind = InputKind.PARAMETER if is_weight else InputKind.BUFFER
        specs.append(_spec(lifted[name], kind, name))
    copies: dict[fx.Node, fx.Node] = {}
    remaining = iter(examples)
    for node in core.graph.nodes:
        if node.op == "get_attr":
            copies[node] = lifted[str(node.target)]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {key: value for key, value in node.meta.items() if key != "from_node"}
        if node.op == "placeholder":
            copies[node].meta["val"] = mode.from_tensor(next(remaining), static_shapes=True)
            specs.append(_spec(copies[node], InputKind.USER_INPUT, None))
    return graph, specs


def _spec(node: fx.Node, kind: InputKind, target: str | None) -> InputSpec:
    persistent = True if kind is InputKind.BUFFER else None
    return InputSpec(kind=kind, arg=TensorArgument(name=node.name), target=target, persistent=persistent)
