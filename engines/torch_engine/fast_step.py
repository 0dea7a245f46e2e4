"""One branch's step by a fast model: inputs cut for the team, the step over my tokens, the prediction put together."""

from __future__ import annotations

from torch import Tensor

from engines.core.fast_model import FastWeights, StepTensors
from engines.core.layout import TokenLayout
from engines.core.model import Arguments, ModelInputs
from engines.core.shard_plan import ShardPlan
from engines.fast.interface import HeadExchange, StepParts
from engines.fast.side_streams import SideStream
from engines.parallel.attention import local_kernel
from engines.parallel.collectives import all_gather
from engines.parallel.mesh import Team
from engines.parallel.strategy import team_kernel
from engines.torch_engine.exchange.heads import LocalHeads, UlyssesHeads, local_attention, without_lse
from engines.torch_engine.exchange.peer_heads import PeerHeads
from engines.torch_engine.exchange.peer_memory import reachable

LATENTS = "hidden_states"
"""The input that changes with every step and is read inside the step."""


def can_run(team: Team, num_heads: int) -> bool:
    """Says whether the fast path knows how this team divides a step: by tokens, whichever strategy, not by weights, and
    with as many heads on every rank.
    """
    return has_whole_weights(team) and num_heads % team.ulysses.size == 0


def has_whole_weights(team: Team) -> bool:
    return team.tensor.size == 1 and team.pipeline.size == 1


class FastStep:
    """A fast model for one team and one layout of tokens. Every rank of the team makes the same calls."""

    def __init__(
        self,
        weights: FastWeights,
        plan: ShardPlan,
        team: Team,
        layout: TokenLayout,
        *,
        sample: Tensor,
        peer_memory: bool = True,
    ) -> None:
        """``sample`` is any activation: it says on which device and in which dtype the step computes.

        ``peer_memory``: ranks write straight into each other's memory instead of calling NCCL, where that was seen to
        work (one host, GPUs that reach each other; the log says which it is).
        """
        self._plan, self._team, self._layout = plan, team, layout
        parts = StepParts(
            exchange=make_exchange(team, layout, sample, peer_memory),
            context_stream=SideStream(sample.device, "stream"),
            mlp_stream=SideStream(sample.device, "mlp", in_use=team.context.size > 1),
            cut=self._cut,
        )
        self._model = weights.model(parts)

    def hoisted(self, arguments: Arguments) -> dict[str, Tensor]:
        """Returns what no step of a job changes, from a whole call."""
        return self._model.hoisted(arguments)

    def latents(self, inputs: ModelInputs) -> Tensor:
        """Returns my tokens of the latents."""
        (shard,) = (one for one in self._plan.shards if one.where == "input" and one.key == LATENTS)
        return self._cut(inputs[LATENTS], shard.dim, shard.stream)

    def __call__(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Returns the whole prediction, equal on all ranks of the team."""
        return self._gathered(self._model.step(latents, hoisted))

    def _cut(self, x: Tensor, dim: int, stream: str) -> Tensor:
        return self._layout.cut(x, dim=dim, stream=stream, index=self._team.context.index)

    def _gathered(self, prediction: Tensor) -> Tensor:
        (gather,) = self._plan.gathers
        gathered = all_gather(prediction, self._team.context)
        return self._layout.join(gathered, dim=gather.dim, stream=gather.stream)


def make_exchange(team: Team, layout: TokenLayout, sample: Tensor, peer_memory: bool) -> HeadExchange:
    """Returns Ulysses in moments that overlap with other work; the other strategies inside attention's moment."""
    if team.context.size != team.ulysses.size:
        return LocalHeads(without_lse(team_kernel(local_kernel(sample.device, sample.dtype), team, layout)))
    attend = local_attention(sample.device, sample.dtype, layout.valid_rows(0, layout.num_chunks))
    if team.ulysses.size == 1:
        return LocalHeads(attend)
    if peer_memory and reachable(team.ulysses, sample.device, sample.dtype):
        return PeerHeads(attend, team.ulysses, sample.device)
    return UlyssesHeads(attend, team.ulysses)
