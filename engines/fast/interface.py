"""What an engine gives a hand-ordered step: the team's exchange of heads, and streams for work beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engines.fast.kernels import HeadNorms
from engines.fast.side_streams import SideStream


class AttendedHeads(Protocol):
    """Results on their way back to the ranks of their tokens."""

    def collect(self) -> Tensor:
        """Returns my rows of the result: groups ``x_GRC`` of columns, in the order of the heads."""
        ...


class SentHeads(Protocol):
    """Queries, keys and values on their way to the ranks of their heads."""

    def attend(self) -> AttendedHeads:
        """Attends to what has arrived, and starts sending the result back."""
        ...


class HeadExchange(Protocol):
    """Attention over the tokens of a team in three moments (send, attend, collect), so that other work fits between.

    ``adds_bias``: ``send`` writes all of q, k and v anew, and can add their bias for nothing on the way.
    Rows are tokens × batch, batch innermost; ``norms`` are those of all rows.
    """

    adds_bias: bool

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Normalises and turns q and k, and starts sending them and v. ``qkv`` may be overwritten.

        The caller has other work to do before ``attend``, and again before ``collect``.
        """
        ...

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Sends the rows from ``start`` to ``stop`` (whole tokens) before the others are there, if the exchange can."""
        ...

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Sends what ``send_run`` has not sent.

        Every row was passed to ``send_run``, and the current stream has waited for it; nothing runs beside this.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What an engine gives a fast model: the team's exchange, and side streams for the context and for the MLP.

    ``exchange_within(stream)`` is one for attention among the tokens of a single stream; all ranks ask for the same
    ones in the same order. ``cut(x, dim, stream)`` gives my rank's tokens of a tensor of all of a stream's.
    ``filled`` are the tokens of each stream, where a prompt is filled up; None where all are as long as they come.
    """

    exchange: HeadExchange
    exchange_within: Callable[[str], HeadExchange]
    context_stream: SideStream
    mlp_stream: SideStream
    cut: Callable[[Tensor, int, str], Tensor]
    filled: Mapping[str, int] | None = None
