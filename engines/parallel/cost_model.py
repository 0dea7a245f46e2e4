"""Predicts what each way to divide a step costs, and picks the fastest that fits: this is strategy "auto"."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engines.parallel.layout import TokenLayout
from engines.parallel.machine import Machine
from engines.parallel.profile import ModelProfile
from engines.parallel.spec import ParallelSpec

ELEMENTWISE_PASSES = 36
"""How often a compiled block reads or writes its hidden state outside products and attention (norms, modulation,
rotary embedding, residuals); fitted to a 57-block model on one GPU."""

LIVE_COPIES = 24
"""Hidden states that are alive at once in the widest place of a block (MLP input and output, q, k, v, residuals)."""

CLOSE = 0.02
"""Candidates this near to the fastest are as good; then the one with the simpler exchange is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of one job: tokens per stream, in the plan's order, and how many branches it has."""

    lengths: tuple[tuple[str, int], ...]
    num_branches: int = 1
    batch: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Predicted milliseconds of one step, by where they go, and bytes on each rank."""

    spec: ParallelSpec
    products_ms: float
    attention_ms: float
    elementwise_ms: float
    exchange_ms: float
    memory_bytes: int

    @property
    def total_ms(self) -> float:
        return self.products_ms + self.attention_ms + self.elementwise_ms + self.exchange_ms


def candidates(profile: ModelProfile, width: int, num_branches: int, *, with_tensor: bool = True) -> list[ParallelSpec]:
    """Every division of a step over ``width`` ranks that the model's heads and the number of branches allow."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    found = []
    for guidance, ring, gather, tensor in itertools.product((1, 2), divisors, divisors, divisors):
        rest, remainder = divmod(width, guidance * ring * gather * tensor)
        if remainder or guidance > num_branches or (ring > 1 and gather > 1) or (tensor > 1 and not with_tensor):
            continue
        spec = ParallelSpec(guidance=guidance, ring=ring, allgather_kv=gather, tensor=tensor, ulysses=max(rest, 1))
        if spec.width == width and _fits_heads(spec, profile.num_heads):
            found.append(spec)
    return found


def predict(profile: ModelProfile, work: Workload, spec: ParallelSpec, machine: Machine) -> Cost:
    """The model of a step: time of its parts on one rank, and what is exchanged that nothing hides."""
    layout = TokenLayout(lengths=work.lengths, num_chunks=spec.context)
    passes = -(-work.num_branches // spec.guidance) * work.batch
    step = _Step(profile, layout, spec, machine)
    return Cost(
        spec=spec,
        products_ms=1e3 * passes * step.products_s(),
        attention_ms=1e3 * passes * step.attention_s(),
        elementwise_ms=1e3 * passes * step.elementwise_s(),
        exchange_ms=1e3 * passes * step.exchange_s() + 1e3 * step.guidance_s(work.batch),
        memory_bytes=step.memory_bytes(work.batch),
    )


def choose(costs: list[Cost], memory_bytes: int) -> Cost:
    """The fastest that fits. Near equals: the one with fewer kinds of exchange, then the smaller memory."""
    fitting = [cost for cost in costs if cost.memory_bytes <= memory_bytes]
    if not fitting:
        least = min(cost.memory_bytes for cost in costs)
        raise ValueError(
            f"no way to divide the step fits {memory_bytes / 2**30:.1f} GiB: the smallest needs {least / 2**30:.1f} "
            "GiB per rank; use more ranks, a smaller size or a smaller model"
        )
    limit = min(cost.total_ms for cost in fitting) * (1 + CLOSE)
    near = [cost for cost in fitting if cost.total_ms <= limit]
    return min(near, key=lambda cost: (cost.spec.name.count("x"), cost.memory_bytes, cost.total_ms))


@dataclass(frozen=True, slots=True)
class _Step:
    """One branch on one rank, in seconds."""

    profile: ModelProfile
    layout: TokenLayout
    spec: ParallelSpec
    machine: Machine

    @property
    def my_tokens(self) -> int:
        return self.layout.chunk_length

    @property
    def my_heads(self) -> float:
        """Heads that my projections give."""
        return self.profile.num_heads / self.spec.tensor

    @property
    def token_bytes(self) -> float:
        """Queries (or keys, or values) of one token with my heads."""
        return self.my_heads * self.profile.head_dim * self.profile.element_bytes

    def products_s(self) -> float:
        total = self.machine.product_s(self.profile.once_flops, 1)
        for stream, cost in self.profile.streams.items():
            tokens = self.profile.tokens(self.layout, stream)
            flops = cost.split_flops / self.spec.tensor + cost.whole_flops
            total += self.machine.product_s(tokens * flops, tokens)
        return total

    def attention_s(self) -> float:
        heads = self.my_heads / self.spec.ulysses
        queries = self.my_tokens * self.spec.ulysses
        flops = 4.0 * queries * self.layout.num_tokens * heads * self.profile.head_dim
        per_turn = self.layout.num_tokens / self.spec.ring
        return self.profile.num_attentions * self.machine.attention_s(flops, min(queries, per_turn))

    def elementwise_s(self) -> float:
        hidden_bytes = self.my_tokens * self.profile.hidden * self.profile.element_bytes
        passes = ELEMENTWISE_PASSES / (2 if self.spec.tensor > 1 else 1)  # about half of them lie inside split layers
        passes += self._layout_passes() / self.spec.tensor
        return self.profile.num_attentions * passes * hidden_bytes / self.machine.copy_bytes_per_s

    def _layout_passes(self) -> float:
        """Copies (read + write) that bring q, k, v and out into an exchange's order; the ring merges in float32."""
        passes = 0.0
        passes += 14 if self.spec.ulysses > 1 else 0
        passes += 4 + 4 * self.spec.allgather_kv if self.spec.allgather_kv > 1 else 0
        passes += 4 + 8 * (self.spec.ring - 1) if self.spec.ring > 1 else 0
        return passes

    def exchange_s(self) -> float:
        a_block = self._ulysses_s() + self._gather_s() + self._ring_s()
        return self.profile.num_attentions * a_block + self._tensor_s() + self._prediction_s()

    def _ulysses_s(self) -> float:
        out_bytes = self.my_tokens * self.token_bytes
        sizes = (3 * out_bytes, out_bytes) if self.spec.ulysses > 1 else ()
        return sum(self.machine.exchange_s("all_to_all", self.spec.ulysses, size) for size in sizes)

    def _gather_s(self) -> float:
        return self.machine.exchange_s("all_gather", self.spec.allgather_kv, 2 * self.my_tokens * self.token_bytes)

    def _ring_s(self) -> float:
        """What attention over the share at hand does not hide of the next share's journey, every turn but the last."""
        if self.spec.ring == 1:
            return 0.0
        journey_s = self.machine.exchange_s("rotation", self.spec.ring, 2 * self.my_tokens * self.token_bytes)
        turn_s = self.attention_s() / self.profile.num_attentions / self.spec.ring
        return (self.spec.ring - 1) * max(journey_s - turn_s, 0.0)

    def _tensor_s(self) -> float:
        if self.spec.tensor == 1:
            return 0.0
        size_bytes = 0.0
        for stream, cost in self.profile.streams.items():
            tokens = self.profile.tokens(self.layout, stream)
            size_bytes += tokens * (cost.reduced_features * self.profile.element_bytes + 4 * cost.num_norms)
        num = self.profile.num_reductions
        return num * self.machine.exchange_s("all_reduce", self.spec.tensor, size_bytes / num)

    def _prediction_s(self) -> float:
        size_bytes = self.my_tokens * self.profile.out_features * self.profile.element_bytes
        return self.machine.exchange_s("all_gather", self.spec.context, size_bytes)

    def guidance_s(self, batch: int) -> float:
        size_bytes = batch * self.layout.num_tokens * self.profile.out_features * self.profile.element_bytes
        return self.machine.exchange_s("all_gather", self.spec.guidance, size_bytes)

    def memory_bytes(self, batch: int) -> int:
        """Weights as the engine holds them (whole, and copies of row-split ones), and activations at their widest."""
        hidden_bytes = batch * self.my_tokens * self.profile.hidden * self.profile.element_bytes
        gathered = 2 * hidden_bytes * self.spec.allgather_kv if self.spec.allgather_kv > 1 else 0.0
        copies = self.profile.row_weight_bytes / self.spec.tensor if self.spec.tensor > 1 else 0.0
        return int(self.profile.weight_bytes + copies + LIVE_COPIES * hidden_bytes + gathered)


def _fits_heads(spec: ParallelSpec, num_heads: int) -> bool:
    return num_heads % (spec.tensor * spec.ulysses) == 0
