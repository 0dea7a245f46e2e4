"""Cost model: predict each way to divide a step and choose the fastest that fits, for strategy "auto".

``encode_s`` and ``decode_s`` predict the other parts of a request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.planner.machine import Machine
from engines.planner.profile import ModelProfile
from engines.planner.step_cost import StepCost

CLOSE = 0.02
"""Candidates within this fraction of the fastest count as equal; then the simpler exchange wins."""

USABLE = 0.9
"""Share of a device's memory that a prediction may fill. Captured steps, libraries and fragments need the rest."""
DECODE_SLOWDOWN = 2.0
"""Time of a decode as a multiple of its arithmetic and its memory traffic, one after the other.

Measured on H100s and H200s: 1.2 for 848x480x121 by HunyuanVideo's auto-encoder, 1.5 for 1024x1024 by
Qwen-Image-2.1's, 2.5 for 832x480x81 by Wan's, 3.5 for 2048x2048 by FLUX.1's, uncompiled
(benchmarks/reports/application_h200_2026-11-23.md, application_one_h200_2026-11-24.md, sweep.jsonl).
"""
MANY_ROWS = 2**14
"""Rows of a convolution as a matrix product, which reaches the rate of large products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step."""

    lengths: tuple[tuple[str, int], ...]
    """Pairs of stream and number of tokens, in the plan's order."""
    num_branches: int = 1
    """Forwards of the step."""
    batch: int = 1
    """Jobs in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Predicted milliseconds of one step by kind of work, and bytes on each rank."""

    spec: ParallelSpec
    """How the ranks divide the step."""
    products_ms: float
    """Linears."""
    attention_ms: float
    """Attention itself."""
    elementwise_ms: float
    """Norms, modulation, activations and copies."""
    exchange_ms: float
    """Exchanges between ranks, less what other work hides."""
    memory_bytes: int
    """Device memory of steps of jobs that take turns."""
    needed_bytes: int
    """The part of it that a step of one job needs: what others compute once is computed again where it has no room."""
    weight_bytes: int
    """The part of ``memory_bytes`` that stays between steps."""
    offload_ms: float = 0.0
    """Copies of offloaded blocks that no other work hides."""
    host_bytes: int = 0
    """Host memory of offloaded blocks, on each rank."""

    @property
    def total_ms(self) -> float:
        return self.products_ms + self.attention_ms + self.elementwise_ms + self.exchange_ms + self.offload_ms


def candidates(profile: ModelProfile, num_ranks: int, num_branches: int) -> list[ParallelSpec]:
    """Return every division of a step over ``num_ranks`` that the model and the number of branches allow."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    found = []
    for guidance, pipeline, ring, gather, tensor in itertools.product(*[divisors] * 5):
        rest, remainder = divmod(num_ranks, guidance * pipeline * ring * gather * tensor)
        if remainder or guidance > num_branches or (ring > 1 and gather > 1):
            continue
        degrees = {"guidance": guidance, "pipeline": pipeline, "ring": ring, "allgather_kv": gather}
        spec = ParallelSpec(**degrees, tensor=tensor, ulysses=max(rest, 1))
        if spec.num_ranks == num_ranks and _allows(profile, spec):
            found.append(spec)
    return found


def predict(
    profile: ModelProfile,
    work: Workload,
    spec: ParallelSpec,
    machine: Machine,
    precision: str = "native",
    *,
    offloaded_blocks: int = 0,
) -> Cost:
    """Predict one step: time of its parts on one rank, and of exchanges that nothing hides.

    A pipeline of s stages takes n + s - 1 turns for n forwards, each as long as a stage's share of the blocks. With
    parallel branches, the part of the team with most branches counts. ``offloaded_blocks`` of each module are copied
    from the host for each forward.
    """
    assert not (offloaded_blocks and spec.divides_weights), "ranks with divided weights offload none"
    layout = TokenLayout(lengths=work.lengths, num_chunks=spec.context)
    step = StepCost(profile, layout, spec, machine, precision, offloaded_blocks)
    forwards = -(-work.num_branches // spec.guidance) * work.batch
    turns = (forwards + spec.pipeline - 1) / spec.pipeline
    handing_on_s = (spec.pipeline - 1) * step.handing_on_s()
    ends_s = forwards * step.prediction_s() + work.batch * step.guidance_s()
    forward_s = step.products_s() + step.attention_s() + step.elementwise_s() + step.exchange_s()
    return Cost(
        spec=spec,
        products_ms=1e3 * turns * step.products_s(),
        attention_ms=1e3 * turns * step.attention_s(),
        elementwise_ms=1e3 * turns * step.elementwise_s(),
        exchange_ms=1e3 * (turns * step.exchange_s() + handing_on_s + ends_s),
        memory_bytes=step.memory_bytes(),
        needed_bytes=step.memory_bytes(is_alone=True),
        weight_bytes=int(step.weight_bytes()),
        offload_ms=1e3 * forwards * max(0.0, step.streaming_s() - forward_s),
        host_bytes=int(step.host_bytes()),
    )


def choose(costs: list[Cost], memory_bytes: int) -> Cost:
    """Return the fastest that fits. Ties are broken by fewer kinds of exchange, then by smaller memory.

    Weights are divided only if whole ones do not fit: ranks with whole weights can form teams of any size.
    """
    fitting = [cost for cost in costs if cost.needed_bytes <= USABLE * memory_bytes]
    if not fitting:
        least = min(cost.needed_bytes for cost in costs)
        raise ValueError(
            f"no way to divide the step fits {memory_bytes / 2**30:.1f} GiB: the smallest needs {least / 2**30:.1f} "
            f"GiB per rank, and {USABLE:.0%} may be used; use more ranks, a smaller size or a smaller model"
        )
    fitting = [cost for cost in fitting if not cost.spec.divides_weights] or fitting
    limit = min(cost.total_ms for cost in fitting) * (1 + CLOSE)
    near = [cost for cost in fitting if cost.total_ms <= limit]
    return min(near, key=lambda cost: (cost.spec.name.count("x"), cost.memory_bytes, cost.total_ms))


def _allows(profile: ModelProfile, spec: ParallelSpec) -> bool:
    heads, rest = divmod(profile.num_heads, spec.tensor)
    has_blocks = spec.pipeline <= max(profile.num_blocks, 1)
    has_tokens = spec.context == 1 or profile.divides_tokens
    return has_blocks and has_tokens and not rest and spec.ulysses <= heads and profile.tensor_unit % spec.tensor == 0


def encode_s(machine: Machine, flops: float, moved_bytes: float, num_tokens: int) -> float:
    """Return the seconds of one prompt: products of its tokens, and one read of the weights."""
    return machine.product_s(flops, num_tokens) + moved_bytes / machine.copy_bytes_per_s


def decode_s(machine: Machine, flops: float, moved_bytes: float) -> float:
    """Return the seconds of one decode on one device, within a factor of two."""
    return DECODE_SLOWDOWN * (machine.product_s(flops, MANY_ROWS) + moved_bytes / machine.copy_bytes_per_s)
