"""Profile of one forward, counted once without weights: products, attention calls, bytes of weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engines.additions import changed_parameters
from engines.core.attention import Prefix
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel, dtype_of
from engines.core.shard_plan import FullWidthNorm, RowLinear, ShardPlan
from engines.parallel.copies import on_cpu, weightless_copy
from engines.parallel.pipeline import pipeline_blocks
from engines.parallel.tensor import split_features
from engines.quantization.linear import QuantLinear

JOINT = "joint"
"""All streams together, where a block has concatenated them."""


@dataclass(kw_only=True, slots=True)
class StreamCost:
    """Costs of a stream per token."""

    split_flops: float = 0.0
    """FLOP of linears that a tensor axis splits."""
    whole_flops: float = 0.0
    """FLOP of all other linears."""
    reduced_features: int = 0
    """Outputs of row-split linears, to be summed over the tensor axis."""
    num_norms: int = 0
    """Full-width norms, each with a sum over the tensor axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """Costs of a branch by stream, and those that do not grow with the tokens."""

    num_heads: int
    """Query heads of self-attention."""
    num_key_heads: int
    """Key heads in self-attention (the most of any), which serve ``num_heads`` queries."""
    head_dim: int
    """Features of a head."""
    num_attentions: int
    """Attentions of a forward; one per block for a model with its own attention."""
    dtype: torch.dtype
    """Dtype of the weights."""
    streams: dict[str, StreamCost]
    """Costs that grow with the tokens, by stream."""
    once_flops: float
    """FLOP of linears whose rows are no tokens, such as modulation."""
    num_reductions: int
    """Sums over the tensor axis: row-split linears and full-width norms."""
    out_features: int
    """Features of a predicted token."""
    weight_bytes: int
    """Weights of all modules."""
    block_weight_bytes: int
    """The part of ``weight_bytes`` in blocks."""
    split_weight_bytes: int
    """The part of ``weight_bytes`` in linears that a tensor axis divides."""
    tensor_unit: int
    """Greatest common divisor of heads and those linears' features."""
    largest_weight_bytes: int = 0
    """The largest of the linears that a tensor axis divides."""
    changed_weight_bytes: int = 0
    """Weights that additions change, whose loaded values are held beside those that steps read."""
    num_blocks: int
    """Blocks that a pipeline may be cut between; 0 if it cannot."""
    num_repeated: int = 0
    """Repeated blocks of each module."""
    largest_block_bytes: int = 0
    """Weights of the largest repeated block."""
    num_modules: int = 1
    """Transformers, of which a step runs one."""
    hoisted_features: Mapping[str, int] = field(default_factory=dict)
    """Numbers for each token of a stream that every rank holds whole (``DenoiserModel``)."""
    hoisted_numbers: int = 0
    """Numbers for each prompt that every rank with whole weights holds (``DenoiserModel``)."""
    num_hoisted: int = 2
    """Results of ``hoisted`` that a job with guidance needs from each module (``DenoiserModel``)."""
    has_fast_path: bool = False
    """True if the family has a hand-ordered step."""
    divides_tokens: bool = True
    """True if ranks may have a share of the tokens each."""

    @property
    def without_originals(self) -> ModelProfile:
        """The costs with loaded values of changed weights in host memory: no device holds them."""
        return replace(self, changed_weight_bytes=0)

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    def tokens(self, layout: TokenLayout, stream: str) -> int:
        """Return the tokens that one context rank holds, padding included."""
        return layout.chunk_length if stream == JOINT else layout.chunk(stream)


@dataclass(slots=True)
class _Counter:
    """Counts layers as they run."""

    lengths: dict[int, str]
    """Stream by its number of tokens."""
    plan: ShardPlan
    """Names the layers that a tensor axis splits."""
    batch: int
    """Entries of the batch, each with all tokens."""
    times: int = 1
    """Number of equal blocks that the running one stands for."""
    streams: dict[str, StreamCost] = field(default_factory=dict)
    once_flops: float = 0.0
    num_attentions: int = 0
    num_key_heads: int = 0
    num_reductions: int = 0
    split_weight_bytes: int = 0
    largest_weight_bytes: int = 0

    def linear(self, name: str, layer: nn.Linear, x: Tensor) -> None:
        rows = x.numel() // layer.in_features // self.batch
        flops = 2.0 * layer.in_features * layer.out_features * self.times
        stream = self.lengths.get(rows)
        rule = self.plan.rule_of(name)
        self.num_reductions += self.times * isinstance(rule, RowLinear)
        self.split_weight_bytes += self.times * layer.weight.nbytes if rule else 0
        self.largest_weight_bytes = max(self.largest_weight_bytes, layer.weight.nbytes if rule else 0)
        if stream is None:
            self.once_flops += flops * rows
            return
        cost = self.streams.setdefault(stream, StreamCost())
        cost.split_flops += flops if rule else 0.0
        cost.whole_flops += 0.0 if rule else flops
        cost.reduced_features += self.times * layer.out_features if isinstance(rule, RowLinear) else 0

    def norm(self, x: Tensor) -> None:
        self.num_reductions += self.times
        stream = self.lengths.get(x.shape[1])
        if stream is not None:
            self.streams.setdefault(stream, StreamCost()).num_norms += self.times

    def attend(
        self,
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.num_attentions += self.times
        self.num_key_heads = max(self.num_key_heads, k_BMGD.shape[2])
        return torch.zeros_like(q_BLHD), q_BLHD.new_zeros(q_BLHD.shape[0], q_BLHD.shape[2], q_BLHD.shape[1])


def profile(model: DenoiserModel) -> ModelProfile:
    """Count the model's small probe step (its first branch) on the CPU, without moving or multiplying weights."""
    branch: Branch = model.probe()[0]
    source = model.modules[branch.module]
    module = weightless_copy(source)
    inputs = {name: on_cpu(x) for name, x in branch.inputs.items()}
    names = _names_by_length(dict(model.stream_lengths(branch.arguments)))
    counter = _Counter(names, model.plan, batch=branch.batch)
    model.set_kernel(module, counter.attend)
    out_features = 0

    def last(_module: nn.Module, _args: object, output: Tensor) -> None:
        nonlocal out_features
        out_features = output.shape[-1]

    for gather in model.plan.gathers:
        module.get_submodule(gather.module).register_forward_hook(last)
    _count_layers(module, counter)
    for name in model.plan.blocks:
        _run_first_only(module.get_submodule(name), counter)
    with torch.device("cpu"), torch.no_grad():
        model.forward(module, {**branch.constants, **inputs})
    num_key_heads = counter.num_key_heads or model.num_heads
    return ModelProfile(
        num_heads=model.num_heads,
        num_key_heads=num_key_heads,
        head_dim=model.head_dim,
        num_attentions=counter.num_attentions or len(model.plan.blocks_of(source)),
        dtype=dtype_of(source),
        streams=counter.streams,
        once_flops=counter.once_flops,
        num_reductions=counter.num_reductions,
        out_features=out_features,
        split_weight_bytes=counter.split_weight_bytes * len(model.modules),
        tensor_unit=_tensor_unit(model, source, num_key_heads),
        largest_weight_bytes=counter.largest_weight_bytes,
        hoisted_features=model.hoisted_features,
        hoisted_numbers=model.hoisted_numbers,
        num_hoisted=model.num_hoisted,
        has_fast_path=model.fast is not None and model.weights is None,
        divides_tokens=bool(model.plan.shards),
        **_sizes_of_blocks(model),
    )


def rough_flops(model: DenoiserModel, branch: Branch) -> float:
    """Return the FLOP of a forward as if all linears and attentions had the tokens of all streams.

    Published models have 0.7 to 0.95 of it for clips, 0.4 to 1 for pictures. It needs no run, no weights and no probe.
    Quantised layers count as before, so all ranks always get the same number.
    """
    module = model.modules[branch.module]
    layers = (each for each in module.modules() if isinstance(each, nn.Linear | QuantLinear))
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    num_tokens = sum(model.stream_lengths(branch.arguments).values())
    num_pairs = num_tokens * len(model.plan.blocks_of(module))  # of one query
    return branch.batch * num_tokens * (2.0 * num_weights + 4.0 * num_pairs * model.num_heads * model.head_dim)


def _sizes_of_blocks(model: DenoiserModel) -> dict[str, int]:
    """Return the fields of a ``ModelProfile`` about modules, their weights and their blocks."""
    modules = model.modules.values()
    block_bytes = [[_weight_bytes(block) for block in model.plan.blocks_of(each)] for each in modules]
    return {
        "weight_bytes": sum(map(_weight_bytes, modules)),
        "block_weight_bytes": sum(map(sum, block_bytes)),
        "changed_weight_bytes": _changed_bytes(model),
        "num_blocks": min(len(pipeline_blocks(each, model.plan)) for each in modules),
        "num_repeated": max(map(len, block_bytes)),
        "largest_block_bytes": max(itertools.chain(*block_bytes), default=0),
        "num_modules": len(modules),
    }


def _tensor_unit(model: DenoiserModel, source: nn.Module, num_key_heads: int) -> int:
    features = split_features(source, model.plan).values()
    return math.gcd(model.num_heads, num_key_heads, *features) if model.plan.linears else 1


def _weight_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _changed_bytes(model: DenoiserModel) -> int:
    changed = (changed_parameters(each, model, name) for name, each in model.modules.items())
    return sum(weight.nbytes for weights in changed for weight in weights)


def _names_by_length(lengths: dict[str, int]) -> dict[int, str]:
    """Return the stream of each number of rows. The probe's lengths differ, so this is unambiguous."""
    names = {sum(lengths.values()): JOINT} | {length: stream for stream, length in lengths.items()}
    assert len(names) == len(lengths) + (len(lengths) > 1), f"the probe's streams are equally long: {lengths}"
    return names


def _count_layers(module: nn.Module, counter: _Counter) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda layer, args, name=name: counter.linear(name, layer, args[0]))
        elif isinstance(counter.plan.rule_of(name), FullWidthNorm):
            layer.register_forward_pre_hook(lambda layer, args: counter.norm(args[0]))


def _run_first_only(blocks: nn.Module, counter: _Counter) -> None:
    """Run and count the first of several equal blocks for all of them."""
    first, *others = blocks.children()
    if len({_signature(block) for block in (first, *others)}) > 1:
        return
    outputs: list[Any] = []

    def begin(_module: nn.Module, _args: object) -> None:
        counter.times = 1 + len(others)

    def end(_module: nn.Module, _args: object, output: Any) -> None:
        counter.times = 1
        outputs.append(output)

    first.register_forward_pre_hook(begin)
    first.register_forward_hook(end)
    for other in others:
        other.forward = lambda *_args, **_named: outputs[-1]


def _signature(block: nn.Module) -> Hashable:
    return type(block), tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())
