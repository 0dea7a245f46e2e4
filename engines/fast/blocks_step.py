"""One step through all blocks as a hand-ordered sequence of GEMMs, fused steps and exchanges.

All rows lie in one tensor, context first, tokens before batch (rows R = tokens × batch), so that a block needs no
concatenation. Each residual is added in the pass that norms for what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from engines.fast.blocks import CONTEXT, LATENTS, BlockModulation, Blocks, SingleBlock
from engines.fast.interface import StepParts
from engines.fast.kernels import (
    HeadNorms,
    Modulation,
    Rows,
    collected_rows,
    join_rows,
    norm_modulate,
    residual_norm_modulate,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksStep:
    """One step through all blocks. ``cos_LP`` and ``sin_LP`` turn my tokens' queries and keys; ``batch``: rows a token.

    The two streams of a dual block meet in attention only: from one attention to the next each depends on nothing but
    itself. So the context's share runs on a stream of its own, in whatever time and on whatever multiprocessors the
    latents' leaves: above all while queries, keys and values of the latents travel. A rank's share of the context is
    small, and products of so few rows leave a GPU mostly idle.
    """

    blocks: Blocks
    parts: StepParts
    modulation: BlockModulation
    cos_LP: Tensor
    sin_LP: Tensor
    batch: int

    def run(self, x_RC: Tensor) -> Tensor:
        """Returns the latents' rows after all blocks and the norm that follows; ``x_RC`` is overwritten.

        Rows of the context are not needed after the last single block's attention, and left out from there.
        """
        singles, first_rows = self.blocks.singles, self.modulation.first_rows
        normed = self._duals(x_RC)
        for index, single in enumerate(singles):
            is_last = index + 1 == len(singles)
            needed = slice(first_rows if is_last else 0, None)
            updates = self._single(normed, single, needed)
            gate_SBC, following = self.modulation.single_end(index)
            following = following.of_stream(LATENTS, updates[0].shape[0]) if is_last else following
            quantize = self.blocks.quantizes and not is_last
            normed = residual_norm_modulate(x_RC[needed], updates, gate_SBC, following, quantize=quantize)
        assert isinstance(normed, Tensor)
        return normed if singles else normed[first_rows:]

    def _single(self, normed: Rows, single: SingleBlock, needed: slice) -> tuple[Tensor, ...]:
        """Returns what the residual gets. Every row is attended to, but only those in ``needed`` go on.

        On several ranks the MLP's first product runs while queries and keys travel, its second while the result does.
        """
        exchange, lane, norms = self.parts.exchange, self.parts.mlp_lane, self._norms(single.head_norms_S2D)
        qkv, bias_E = single.qkv.without_bias() if exchange.adds_bias else (single.qkv, None)
        if bias_E is not None:
            norms = replace(norms, bias_3HD=bias_E.view(3, -1, norms.weight_S2D.shape[-1]))
        sent = exchange.send(_by_head(qkv(normed), norms), self.batch, norms)
        with lane.aside():
            hidden = single.up.activated(normed[needed])
        attended = sent.attend()
        with lane.aside(after_main=False):
            update_RC = single.out_mlp(hidden)
        result = collected_rows(attended.collect(), self.blocks.precision)
        lane.join()
        return single.out_attention.add(update_RC, result[needed])

    def _duals(self, x_RC: Tensor) -> Rows:
        """Returns all rows normed for what follows the dual blocks; ``x_RC`` has passed them."""
        qkv_RE: Tensor | None = _new_qkv(x_RC)
        normed: dict[int, Rows] = {}
        for stream in (CONTEXT, LATENTS):
            with self._lane(stream):
                self._begin(stream, x_RC, qkv_RE)
        for index, dual in enumerate(self.blocks.duals):
            assert qkv_RE is not None
            self.parts.stream_lane.join()
            norms = self._norms(dual.head_norms_S2D)
            attended = self.parts.exchange.send_rest(_by_head(qkv_RE, norms), self.batch, norms).attend()
            result = collected_rows(attended.collect(), self.blocks.precision)
            # Made before the streams part: what was in this memory before has been read by then.
            following = _new_qkv(x_RC) if index + 1 < len(self.blocks.duals) else None
            for stream in (CONTEXT, LATENTS):
                with self._lane(stream):
                    normed[stream] = self._rest(stream, index, result, x_RC, following)
            qkv_RE = following
        self.parts.stream_lane.join()
        return join_rows(normed[CONTEXT], normed[LATENTS])

    def _begin(self, stream: int, x_RC: Tensor, qkv_RE: Tensor | None) -> None:
        start, stop = self._rows(stream, x_RC)
        modulation = self.modulation.first().of_stream(stream, stop - start)
        normed = norm_modulate(x_RC[start:stop], modulation, quantize=self.blocks.quantizes)
        self._project(stream, 0, normed, qkv_RE)

    def _rest(self, stream: int, index: int, result: Rows, x_RC: Tensor, qkv_RE: Tensor | None) -> Rows:
        """Does everything of a block after its attention, and of the next block before its own."""
        dual, (start, stop) = self.blocks.duals[index], self._rows(stream, x_RC)
        mine_RC = x_RC[start:stop]
        update_RC = dual.out.of_stream(stream)(result[start:stop])
        normed = self._norm(stream, mine_RC, update_RC, self.modulation.dual_middle(index), self.blocks.quantizes)
        update_RC = dual.down.of_stream(stream)(dual.up.of_stream(stream).activated(normed))
        quantize = self.blocks.quantizes_after_dual(index)
        normed = self._norm(stream, mine_RC, update_RC, self.modulation.dual_end(index), quantize)
        if qkv_RE is not None:
            self._project(stream, index + 1, normed, qkv_RE)
        return normed

    def _norm(
        self, stream: int, x_RC: Tensor, update_RC: Tensor, vectors: tuple[Tensor, Modulation], quantize: bool
    ) -> Rows:
        gate_SBC, modulation = vectors
        gate_1BC = gate_SBC[:1] if stream == CONTEXT else gate_SBC[-1:]
        mine = modulation.of_stream(stream, x_RC.shape[0])
        return residual_norm_modulate(x_RC, (update_RC,), gate_1BC, mine, quantize=quantize)

    def _project(self, stream: int, index: int, normed: Rows, qkv_RE: Tensor | None) -> None:
        """Makes queries, keys and values of block ``index``, sent at once if the exchange can."""
        assert qkv_RE is not None
        dual, (start, stop) = self.blocks.duals[index], self._rows(stream, qkv_RE)
        dual.qkv.of_stream(stream)(normed, out=qkv_RE[start:stop])
        norms = self._norms(dual.head_norms_S2D)
        self.parts.exchange.send_run(_by_head(qkv_RE, norms), self.batch, norms, start, stop)

    def _norms(self, weight_S2D: Tensor) -> HeadNorms:
        first_rows = self.modulation.first_rows
        return HeadNorms(weight_S2D=weight_S2D, cos_LP=self.cos_LP, sin_LP=self.sin_LP, first_rows=first_rows)

    def _rows(self, stream: int, x_RC: Tensor) -> tuple[int, int]:
        first_rows = self.modulation.first_rows
        return (0, first_rows) if stream == CONTEXT else (first_rows, x_RC.shape[0])

    @contextmanager
    def _lane(self, stream: int) -> Iterator[None]:
        if stream == LATENTS:
            yield
            return
        with self.parts.stream_lane.aside():
            yield


def _by_head(qkv_RE: Tensor, norms: HeadNorms) -> Tensor:
    """Returns the view ``qkv_R3HD``."""
    return qkv_RE.view(qkv_RE.shape[0], 3, -1, norms.weight_S2D.shape[-1])


def _new_qkv(x_RC: Tensor) -> Tensor:
    return x_RC.new_empty(x_RC.shape[0], 3 * x_RC.shape[1])
