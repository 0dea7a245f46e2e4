"""What strategy "auto" means on this machine: measured once at start, then the same for every step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from engines.model import DenoiserModel
from engines.parallel.cost_model import Workload, candidates, choose, predict
from engines.parallel.measure import measure
from engines.parallel.mesh import Groups, Teams, gang_widths
from engines.parallel.profile import profile
from engines.parallel.spec import ParallelSpec

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = {"cpu": 256, "cuda": 4096}
"""Length of the longest stream for which a choice is made, if the configuration does not say: a small picture on CPUs,
1024 x 1024 pixels on GPUs."""

Specs = dict[int, tuple[ParallelSpec, ParallelSpec]]


def choose_specs(
    model: DenoiserModel,
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    groups: Groups,
    typical_tokens: int | None,
) -> Specs:
    """Per width the fastest division of one branch, and of two. All ranks make the call and get the same answer.

    Tensor parallelism is left out: the engine holds whole weights for narrower teams, so it would save no memory.
    """
    if num_ranks == 1:
        return {1: (ParallelSpec(), ParallelSpec())}
    counted = profile(model)
    lines = [ParallelSpec(ulysses=width) for width in gang_widths(num_ranks)]
    machine = measure(counted, Teams(rank=rank, num_ranks=num_ranks, specs=lines, groups=groups), device)
    lengths = typical_lengths(model, typical_tokens or TYPICAL_TOKENS.get(device.type, 4096))
    specs: Specs = {}
    for width in gang_widths(num_ranks):
        best = []
        for num_branches in (1, 2):
            work = Workload(lengths=lengths, num_branches=num_branches)
            allowed = candidates(counted, width, num_branches, with_tensor=False)
            cost = choose([predict(counted, work, spec, machine) for spec in allowed], machine.memory_bytes)
            logger.info("auto strategy", extra={"width": width, "branches": num_branches, "strategy": cost.spec.name})
            best.append(cost.spec)
        specs[width] = (best[0], best[1])
    return specs


def typical_lengths(model: DenoiserModel, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """The probe's streams, grown together until the longest has ``num_tokens``."""
    lengths: Mapping[str, int] = model.stream_lengths(model.probe()[0].inputs)
    longest = max(lengths.values())
    return tuple((stream, max(1, lengths[stream] * num_tokens // longest)) for stream in model.plan.streams)
