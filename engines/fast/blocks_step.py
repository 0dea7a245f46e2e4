"""One step through all blocks as a hand-ordered sequence of GEMMs, fused passes and exchanges.

All rows (R = tokens × batch) lie in one tensor, context first, tokens before batch, so no block concatenates. Each
residual is added in the pass of the next norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from engines.core.model import Precision
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
    """One step through all blocks of one rank's tokens.

    The two streams of a dual block meet only in attention. Between two attentions, the context runs on its own CUDA
    stream. It uses time and multiprocessors that the latents leave, mainly while the latents' q, k and v are exchanged.
    A rank's share of the context is small, and GEMMs of few rows leave a GPU mostly idle.
    """

    blocks: Blocks
    """GEMMs and norms of all blocks."""
    parts: StepParts
    """Exchanges and side streams."""
    modulation: BlockModulation
    """Vectors of shift, scale and gate for each block."""
    cos_LP: Tensor
    """Cosine of the rotation of this rank's q and k, by token and pair of features."""
    sin_LP: Tensor
    """Sine of the same."""
    batch: int
    """Rows of a token: entries of the batch."""

    def run(self, x_RC: Tensor) -> Tensor:
        """Return the latents' rows after all blocks and the final norm; ``x_RC`` is overwritten.

        The context's rows are dropped after the last single block's attention.
        """
        singles, first_rows = self.blocks.singles, self.modulation.first_rows
        normed = self._duals(x_RC)
        for index, single in enumerate(singles):
            is_last = index + 1 == len(singles)
            needed = slice(first_rows if is_last else 0, None)
            norms, precision = self._norms(single.head_norms_S2D), self.blocks.precision
            updates = _single_updates(single, normed, needed, self.parts, norms, self.batch, precision)
            gate_SBC, following = self.modulation.single_end(index)
            following = following.of_stream(LATENTS, updates[0].shape[0]) if is_last else following
            quantize = self.blocks.quantizes and not is_last
            normed = residual_norm_modulate(x_RC[needed], updates, gate_SBC, following, quantize=quantize)
        assert isinstance(normed, Tensor)
        return normed if singles else normed[first_rows:]

    def _duals(self, x_RC: Tensor) -> Rows:
        """Run the dual blocks on ``x_RC`` in place; return all rows normed for the next consumer."""
        qkv_RE: Tensor | None = _new_qkv(x_RC)
        normed: dict[int, Rows] = {}
        for stream in (CONTEXT, LATENTS):
            with self._beside(stream):
                self._begin(stream, x_RC, qkv_RE)
        for index, dual in enumerate(self.blocks.duals):
            assert qkv_RE is not None
            self.parts.context_stream.wait()
            norms = self._norms(dual.head_norms_S2D)
            attended = self.parts.exchange.send_rest(_by_head(qkv_RE, norms), self.batch, norms).attend()
            result = collected_rows(attended.collect(), self.blocks.precision)
            # Allocated before the streams fork: earlier contents of this memory have been read by then.
            following = _new_qkv(x_RC) if index + 1 < len(self.blocks.duals) else None
            for stream in (CONTEXT, LATENTS):
                with self._beside(stream):
                    normed[stream] = self._rest(stream, index, result, x_RC, following)
            qkv_RE = following
        self.parts.context_stream.wait()
        return join_rows(normed[CONTEXT], normed[LATENTS])

    def _begin(self, stream: int, x_RC: Tensor, qkv_RE: Tensor | None) -> None:
        start, stop = self._rows(stream, x_RC)
        modulation = self.modulation.first().of_stream(stream, stop - start)
        normed = norm_modulate(x_RC[start:stop], modulation, quantize=self.blocks.quantizes)
        self._project(stream, 0, normed, qkv_RE)

    def _rest(self, stream: int, index: int, result: Rows, x_RC: Tensor, qkv_RE: Tensor | None) -> Rows:
        """Run the block's part after its attention, and the next block's part before its own."""
        dual, (start, stop) = self.blocks.duals[index], self._rows(stream, x_RC)
        rows_RC = x_RC[start:stop]
        update_RC = dual.out.of_stream(stream)(result[start:stop])
        normed = self._norm(stream, rows_RC, update_RC, self.modulation.dual_middle(index), self.blocks.quantizes)
        update_RC = dual.down.of_stream(stream)(dual.up.of_stream(stream).activated(normed))
        quantize = self.blocks.quantizes_after_dual(index)
        normed = self._norm(stream, rows_RC, update_RC, self.modulation.dual_end(index), quantize)
        if qkv_RE is not None:
            self._project(stream, index + 1, normed, qkv_RE)
        return normed

    def _norm(
        self, stream: int, x_RC: Tensor, update_RC: Tensor, vectors: tuple[Tensor, Modulation], quantize: bool
    ) -> Rows:
        gate_SBC, modulation = vectors
        gate_1BC = gate_SBC[:1] if stream == CONTEXT else gate_SBC[-1:]
        own = modulation.of_stream(stream, x_RC.shape[0])
        return residual_norm_modulate(x_RC, (update_RC,), gate_1BC, own, quantize=quantize)

    def _project(self, stream: int, index: int, normed: Rows, qkv_RE: Tensor | None) -> None:
        """Compute queries, keys and values of block ``index``; send them at once if the exchange can."""
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
    def _beside(self, stream: int) -> Iterator[None]:
        """Run the context's share on its side stream, the latents' on the current one."""
        if stream == LATENTS:
            yield
            return
        with self.parts.context_stream.run():
            yield


def _by_head(qkv_RE: Tensor, norms: HeadNorms) -> Tensor:
    """Return the view ``qkv_R3HD``."""
    return qkv_RE.view(qkv_RE.shape[0], 3, -1, norms.weight_S2D.shape[-1])


def _new_qkv(x_RC: Tensor) -> Tensor:
    return x_RC.new_empty(x_RC.shape[0], 3 * x_RC.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class SinglesStep:
    """One step of single-stream blocks that share their modulation, over this rank's rows of one or more streams."""

    blocks: Sequence[SingleBlock]
    """Blocks in running order."""
    precision: Precision
    """Precision of the GEMMs."""
    parts: StepParts
    """Exchange among the tokens of these rows, and side streams."""
    modulation: Modulation
    """Shift and scale of the norm before each block."""
    gate_SBC: Tensor
    """Gate of each block, in the segments of ``modulation``."""
    last: tuple[Tensor, Modulation] | None = None
    """Gate of the last block, and modulation of the norm after it, for the rows ``needed``; None: the others'."""
    needed: slice = field(default_factory=lambda: slice(None))
    """Rows that continue after the last block's attention."""
    turns_2LP: Tensor
    """Cosine and sine of the rotation of q and k, by token and pair of features."""
    batch: int
    """Rows of a token: entries of the batch."""

    def run(self, x_RC: Tensor) -> Tensor:
        """Return the ``needed`` rows after all blocks and the last norm; ``x_RC`` gets those before it."""
        quantize, (cos_LP, sin_LP) = self.precision == "fp8", self.turns_2LP
        normed = norm_modulate(x_RC, self.modulation, quantize=quantize)
        for index, block in enumerate(self.blocks):
            is_last = index + 1 == len(self.blocks)
            needed = self.needed if is_last else slice(None)
            norms = HeadNorms(weight_S2D=block.head_norms_S2D, cos_LP=cos_LP, sin_LP=sin_LP, first_rows=0)
            updates = _single_updates(block, normed, needed, self.parts, norms, self.batch, self.precision)
            gate_SBC, modulation = (is_last and self.last) or (self.gate_SBC, self.modulation)
            quantize = quantize and not is_last
            normed = residual_norm_modulate(x_RC[needed], updates, gate_SBC, modulation, quantize=quantize)
        assert isinstance(normed, Tensor)
        return normed


def _single_updates(
    single: SingleBlock,
    normed: Rows,
    needed: slice,
    parts: StepParts,
    norms: HeadNorms,
    batch: int,
    precision: Precision,
) -> tuple[Tensor, ...]:
    """Return a block's updates of the residual. All rows are attended to; only those in ``needed`` continue.

    On several ranks the MLP's first GEMM runs while queries and keys travel, its second while the result does.
    """
    exchange, mlp_stream = parts.exchange, parts.mlp_stream
    qkv, bias_E = single.qkv.without_bias() if exchange.adds_bias else (single.qkv, None)
    if bias_E is not None:
        norms = replace(norms, bias_3HD=bias_E.view(3, -1, norms.weight_S2D.shape[-1]))
    sent = exchange.send(_by_head(qkv(normed), norms), batch, norms)
    with mlp_stream.run():
        hidden = single.up.activated(normed[needed])
    attended = sent.attend()
    with mlp_stream.run(after_current=False):
        update_RC = single.out_mlp(hidden)
    result = collected_rows(attended.collect(), precision)
    mlp_stream.wait()
    return single.out_attention.add(update_RC, result[needed])
