"""Dual-stream blocks whose two streams meet in attention only.

From one attention to the next a stream depends on nothing but itself. So the text's share runs on a lane of its own, in
whatever time and on whatever multiprocessors the picture's leaves: above all while queries, keys and values of the
picture travel. A rank's share of the text is small, and products of so few rows leave a GPU mostly idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from engines.fast.gemm import Product
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
from pipelines.flux.fast_weights import FluxWeights, Pair
from pipelines.flux.modulation import FluxModulation

TEXT, IMAGE = 0, 1


@dataclass(frozen=True, slots=True)
class StreamsApart:
    """All dual blocks of one step. ``batch``: rows of a token."""

    weights: FluxWeights
    parts: StepParts
    modulation: FluxModulation
    rope: tuple[Tensor, Tensor]
    batch: int

    def run(self, x_RC: Tensor) -> Rows:
        """``x_RC`` after all dual blocks (in place), normed for what follows; text first."""
        exchange = self.parts.exchange
        qkv_RE: Tensor | None = self._new_qkv(x_RC)
        normed: dict[int, Rows] = {}
        for stream in (TEXT, IMAGE):
            with self._lane(stream):
                self._begin(stream, x_RC, qkv_RE)
        for index in range(len(self.weights.duals)):
            assert qkv_RE is not None
            self.parts.stream_lane.join()
            attended = exchange.send_rest(self._by_head(qkv_RE), self.batch, self._norms(index)).attend()
            result = collected_rows(attended.collect(), self.weights.precision)
            # Made before the lanes part: what was in this memory before has been read by then.
            following = self._new_qkv(x_RC) if index + 1 < len(self.weights.duals) else None
            for stream in (TEXT, IMAGE):
                with self._lane(stream):
                    normed[stream] = self._rest(stream, index, result, x_RC, following)
            qkv_RE = following
        self.parts.stream_lane.join()
        return join_rows(normed[TEXT], normed[IMAGE])

    def _begin(self, stream: int, x_RC: Tensor, qkv_RE: Tensor | None) -> None:
        start, stop = self._rows(stream, x_RC)
        modulation = self.modulation.first().of_stream(stream, stop - start)
        normed = norm_modulate(x_RC[start:stop], modulation, quantize=self.weights.precision == "fp8")
        self._project(stream, 0, normed, qkv_RE)

    def _rest(self, stream: int, index: int, result: Rows, x_RC: Tensor, qkv_RE: Tensor | None) -> Rows:
        """Everything of a block after its attention, and of the next block before its own."""
        dual, (start, stop) = self.weights.duals[index], self._rows(stream, x_RC)
        mine_RC = x_RC[start:stop]
        update_RC = _of(dual.out, stream)(result[start:stop])
        quantize = self.weights.precision == "fp8"
        normed = self._norm(stream, mine_RC, update_RC, self.modulation.dual_middle(index), quantize)
        update_RC = _of(dual.down, stream)(_of(dual.up, stream).activated(normed))
        quantize = self.weights.quantizes_after_dual(index)
        normed = self._norm(stream, mine_RC, update_RC, self.modulation.dual_end(index), quantize)
        if qkv_RE is not None:
            self._project(stream, index + 1, normed, qkv_RE)
        return normed

    def _norm(
        self, stream: int, x_RC: Tensor, update_RC: Tensor, vectors: tuple[Tensor, Modulation], quantize: bool
    ) -> Rows:
        gate_SBC, modulation = vectors
        gate_1BC = gate_SBC[:1] if stream == TEXT else gate_SBC[-1:]
        mine = modulation.of_stream(stream, x_RC.shape[0])
        return residual_norm_modulate(x_RC, (update_RC,), gate_1BC, mine, quantize=quantize)

    def _project(self, stream: int, index: int, normed: Rows, qkv_RE: Tensor | None) -> None:
        """Queries, keys and values of block ``index``, sent at once if the exchange can."""
        assert qkv_RE is not None
        start, stop = self._rows(stream, qkv_RE)
        _of(self.weights.duals[index].qkv, stream)(normed, out=qkv_RE[start:stop])
        self.parts.exchange.send_run(self._by_head(qkv_RE), self.batch, self._norms(index), start, stop)

    def _norms(self, index: int) -> HeadNorms:
        return HeadNorms(
            weight_S2D=self.weights.duals[index].head_norms_S2D,
            cos_LP=self.rope[0],
            sin_LP=self.rope[1],
            first_rows=self.modulation.first_rows,
        )

    def _by_head(self, qkv_RE: Tensor) -> Tensor:
        return qkv_RE.view(qkv_RE.shape[0], 3, -1, self.weights.duals[0].head_norms_S2D.shape[-1])

    def _new_qkv(self, x_RC: Tensor) -> Tensor:
        return x_RC.new_empty(x_RC.shape[0], 3 * x_RC.shape[1])

    def _rows(self, stream: int, x_RC: Tensor) -> tuple[int, int]:
        first = self.modulation.first_rows
        return (0, first) if stream == TEXT else (first, x_RC.shape[0])

    @contextmanager
    def _lane(self, stream: int) -> Iterator[None]:
        if stream == IMAGE:
            yield
            return
        with self.parts.stream_lane.aside():
            yield


def _of(pair: Pair, stream: int) -> Product:
    return pair.text if stream == TEXT else pair.image
