"""One branch's step by a fast model: cut inputs for the team, run the step over own tokens, gather the prediction."""

from __future__ import annotations

from torch import Tensor

from engines.core.attention import Kernel
from engines.core.layout import TokenLayout
from engines.core.model import KEPT, Arguments, FastWeights, StepTensors
from engines.fast.interface import HeadExchange, SideStream, StepParts
from engines.parallel.collectives import all_gather
from engines.parallel.local_attention import crop_keys, local_kernel
from engines.parallel.mesh import Team
from engines.parallel.strategies import team_kernel
from engines.torch_engine.exchange.heads import KeyMask, LocalHeads, UlyssesHeads, attention_of, without_lse
from engines.torch_engine.exchange.peer_heads import PeerHeads
from engines.torch_engine.exchange.peer_memory import reachable


class FastStep:
    """A fast model for one team and one shape of latents. Every rank of the team makes the same calls."""

    def __init__(
        self,
        weights: FastWeights,
        team: Team,
        layout: TokenLayout,
        *,
        latents: Tensor,
        peer_memory: bool = True,
        side_streams: bool = True,
        fills_prompts: bool = False,
        attention: str = "auto",
    ) -> None:
        """Prepare a step on the device and in the dtype of the whole ``latents``.

        ``peer_memory``: ranks write into each other's memory instead of calling NCCL, if a trial succeeds (one host,
        GPUs that reach each other; the log has the result). ``side_streams``: ranks of a team compute beside their
        exchanges; no effect on one rank. ``fills_prompts``: the layout's lengths are ``FastWeights.filled_lengths``.
        """
        is_alone, local = team.context.size == 1, local_kernel(latents.device, latents.dtype, attention)
        self._weights, self._team, self._layout = weights, team, layout
        self._like = latents.new_empty(()).expand(latents.shape)
        self._keys = KeyMask(layout, _chunks_attended(team)) if fills_prompts else None
        parts = StepParts(
            exchange=make_exchange(team, layout, latents, local, peer_memory, self._keys),
            exchange_within=lambda stream: make_exchange(team, layout.of_stream(stream), latents, local, peer_memory),
            alone=LocalHeads(attention_of(local)),
            context_stream=SideStream(latents.device, "stream", in_use=side_streams or is_alone),
            mlp_stream=SideStream(latents.device, "mlp", in_use=side_streams and not is_alone),
            cut=self._cut,
            filled=dict(layout.lengths) if fills_prompts else None,
        )
        self._model = weights.model(parts)

    def hoisted(self, arguments: Arguments) -> dict[str, Tensor]:
        """Return the tensors that no step of a job changes, from a whole call."""
        hoisted = self._model.hoisted(arguments)
        return hoisted if self._keys is None else {**hoisted, KEPT: self._keys.in_order(hoisted[KEPT])}

    def tokens(self, latents: Tensor) -> Tensor:
        """Return this rank's tokens of whole latents."""
        return self._cut(self._weights.tokens(latents), 1, self._weights.latents_stream)

    def __call__(self, tokens_BSD: Tensor, hoisted: StepTensors) -> Tensor:
        """Return the whole prediction, equal on all ranks of the team."""
        if self._keys is not None:
            self._keys.mask_M = hoisted[KEPT]
        gathered = all_gather(self._model.step(tokens_BSD, hoisted), self._team.context)
        predicted_BSD = self._layout.join(gathered, dim=1, stream=self._weights.latents_stream)
        return self._weights.prediction(predicted_BSD, self._like)

    def _cut(self, x: Tensor, dim: int, stream: str) -> Tensor:
        return self._layout.cut(x, dim=dim, stream=stream, index=self._team.context.index)


def make_exchange(
    team: Team, layout: TokenLayout, sample: Tensor, local: Kernel, peer_memory: bool, keys: KeyMask | None = None
) -> HeadExchange:
    """Return Ulysses in phases that overlap with other work; the other strategies run inside the attention phase.

    ``local`` is attention on one device. ``keys`` masks the keys of ``_chunks_attended``; None: all are attended.
    """
    if not _splits_heads_alone(team):
        kernel = team_kernel(local, team, layout)
        return LocalHeads(without_lse(kernel) if keys is None else keys.attend(kernel))
    whole_rows = layout.valid_rows(0, layout.num_chunks)
    attend = attention_of(local, whole_rows) if keys is None else keys.attend(crop_keys(local, whole_rows))
    if team.ulysses.size == 1:
        return LocalHeads(attend)
    if peer_memory and reachable(team.ulysses, sample.device, sample.dtype):
        return PeerHeads(attend, team.ulysses, sample.device)
    return UlyssesHeads(attend, team.ulysses)


def _splits_heads_alone(team: Team) -> bool:
    """Return whether a rank attends to the keys of the whole team at once, without communication inside attention."""
    return team.context.size == team.ulysses.size


def _chunks_attended(team: Team) -> range:
    """Return the ranks whose keys a rank holds when it attends: masks cover these."""
    index = team.context.index
    return range(team.context.size) if _splits_heads_alone(team) else range(index, index + 1)
