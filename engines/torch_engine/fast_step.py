"""One branch's step by a fast model: inputs cut for the team, the step over my tokens, the prediction put together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engines.core.fast_model import FastWeights, StepTensors
from engines.core.layout import TokenLayout
from engines.core.model import ModelInputs
from engines.core.shard_plan import ShardPlan
from engines.fast.interface import StepParts
from engines.fast.side_streams import Lane
from engines.parallel.attention import local_kernel
from engines.parallel.collectives import all_gather
from engines.parallel.mesh import Team
from engines.parallel.strategy import team_kernel
from engines.torch_engine.exchange.heads import HeadExchange, LocalHeads, UlyssesHeads, local_attention, without_lse
from engines.torch_engine.exchange.peer_heads import PeerHeads
from engines.torch_engine.exchange.peer_memory import reachable

LATENTS = "hidden_states"
"""The input that changes with every step and is read inside the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What may run side by side, and how heads are exchanged.

    ``stream_lane``: the second stream's products beside the first's. ``mlp_lane``: the MLP of single-stream blocks
    beside attention. ``num_parts``: shares of a rank's heads that are exchanged one after the other. ``peer_memory``:
    ranks write straight into each other's memory instead of calling NCCL, where that was seen to work (one host, GPUs
    that reach each other; the log says which it is); ``peer_copies``: by copy engines wherever products can run
    meanwhile. ``streams_apart``: each stream of a dual-stream block runs by itself from one attention to the next, so
    that the second stream's whole share may fill the time that the first one's exchange leaves. Models that run as
    their module exchange heads in parts in steps of ``parts_from_tokens`` and more; ``module_parts`` is how many with
    NCCL.
    """

    stream_lane: bool = True
    mlp_lane: bool = True
    num_parts: int = 1
    peer_memory: bool = True
    peer_copies: bool = True
    streams_apart: bool = True
    module_parts: int = 2
    parts_from_tokens: int = 16384


DEFAULT_OVERLAP = Overlap()
"""What was fastest on H200s (docs/denoise_step.md); `benchmarks.denoise_step` measures the alternatives."""


def can_run(team: Team) -> bool:
    """Whether the fast path knows how this team divides a step: by tokens, whichever strategy, but not by weights."""
    return team.tensor.size == 1 and team.pipeline.size == 1


class FastStep:
    """A fast model for one team and one layout of tokens. Every rank of the team makes the same calls."""

    def __init__(
        self, weights: FastWeights, plan: ShardPlan, team: Team, layout: TokenLayout, overlap: Overlap, sample: Tensor
    ) -> None:
        """``sample`` is any activation: it says on which device and in which dtype the step computes."""
        self._plan, self._team, self._layout = plan, team, layout
        parts = StepParts(
            exchange=make_exchange(team, layout, overlap, sample),
            stream_lane=Lane(sample.device, "stream", enabled=overlap.stream_lane),
            mlp_lane=Lane(sample.device, "mlp", enabled=overlap.mlp_lane and team.context.size > 1),
            streams_apart=overlap.streams_apart,
        )
        self._model = weights.model(parts)

    def ahead(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """What no step of a job changes, from whole inputs."""
        return self._model.ahead(self._split(inputs))

    def latents(self, inputs: ModelInputs) -> Tensor:
        """My tokens of the latents."""
        return self._split({LATENTS: inputs[LATENTS]})[LATENTS]

    def __call__(self, latents: Tensor, ahead: StepTensors) -> Tensor:
        """The whole prediction, equal on all ranks of the team."""
        return self._gathered(self._model.step(latents, ahead))

    def _split(self, inputs: ModelInputs) -> dict[str, Tensor]:
        index = self._team.context.index
        cuts = {shard.key: shard for shard in self._plan.shards if shard.module == ""}
        return {
            name: self._layout.cut(x, dim=cuts[name].dim, stream=cuts[name].stream, index=index) if name in cuts else x
            for name, x in inputs.items()
        }

    def _gathered(self, prediction: Tensor) -> Tensor:
        (gather,) = self._plan.gathers
        gathered = all_gather(prediction, self._team.context)
        return self._layout.join(gathered, dim=gather.dim, stream=gather.stream)


def make_exchange(team: Team, layout: TokenLayout, overlap: Overlap, sample: Tensor) -> HeadExchange:
    """Ulysses in pieces that overlap with other work; the other strategies inside attention's moment."""
    if team.context.size != team.ulysses.size:
        return LocalHeads(without_lse(team_kernel(local_kernel(sample.device, sample.dtype), team, layout)))
    attend = local_attention(sample.device, sample.dtype, layout.valid_rows(0, layout.num_chunks))
    if team.ulysses.size == 1:
        return LocalHeads(attend)
    if overlap.peer_memory and reachable(team.ulysses, sample.device, sample.dtype):
        return PeerHeads(attend, team.ulysses, sample.device, num_parts=overlap.num_parts, copies=overlap.peer_copies)
    return UlyssesHeads(attend, team.ulysses, num_parts=overlap.num_parts)
