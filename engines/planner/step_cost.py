"""Cost of one branch's step on one rank: seconds by kind of work, and bytes.

``MemoryFloor`` is the least memory of a step. Steps that cannot fit are refused: running out of memory inside a step
breaks the gang, and then the gang that repeats the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.core.attention import HeadShare, share_heads
from engines.core.field_error import FieldError
from engines.core.layout import TokenLayout
from engines.core.model import MAX_CAPTURED_BYTES, max_hoisted_bytes
from engines.core.spec import ParallelSpec
from engines.planner.machine import Machine
from engines.planner.profile import ModelProfile

ELEMENTWISE_PASSES = 36
"""Reads and writes of the hidden state by a compiled block outside products and attention.

They are norms, modulation, rotary embedding and residuals. Fitted to a 57-block model on one GPU."""

EAGER_PASSES = 90
"""The same for an eager block, as with offloaded blocks. Assumed, not measured."""

FAST_PASSES = 9.6
"""The same for a hand-ordered step: a dual block has 12 (two norms of 4, q and k normed in place), a single one 8.
Most models have twice as many single blocks."""

FAST_ULYSSES_PASSES = 4
"""v takes part in the norm's pass, and the result's columns are joined."""

FAST_SHOWN = 0.7
"""Share of a fast step's head exchange that nothing hides: most blocks run a product beside it. Fitted to a 57-block
model on 2 and 4 GPUs with peer memory (0.5 and 0.9)."""

LIVE_COPIES = 24
"""Hidden states alive at once in the widest place of a block (MLP input and output, q, k, v, residuals)."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of all blocks as if the rank ran them all; a pipeline divides them by its stages."""

    profile: ModelProfile
    """The model's costs."""
    layout: TokenLayout
    """Tokens of each stream and of each rank."""
    spec: ParallelSpec
    """How ranks divide the step."""
    machine: Machine
    """Speeds of devices and exchanges."""
    precision: str = "native"
    """Precision of the linears: "native", or a measured scheme."""
    offloaded_blocks: int = 0
    """Blocks of each module that are in host memory and copied for each forward."""

    @property
    def own_tokens(self) -> int:
        return self.layout.chunk_length

    @property
    def heads(self) -> HeadShare:
        """Distribution of the heads that this rank projects, including zero heads for padding."""
        queries, keys = (number // self.spec.tensor for number in (self.profile.num_heads, self.profile.num_key_heads))
        return share_heads(queries, keys, self.spec.ulysses)

    @property
    def query_bytes(self) -> int:
        """Queries (or results) of this rank's tokens, as exchanged."""
        return self.own_tokens * self.heads.all_queries * self.profile.head_dim * self.profile.element_bytes

    @property
    def key_bytes(self) -> int:
        """Keys (or values) of this rank's tokens, as exchanged."""
        return self.own_tokens * self.heads.all_keys * self.profile.head_dim * self.profile.element_bytes

    @property
    def hidden_bytes(self) -> float:
        """Hidden state of this rank's tokens."""
        return self.own_tokens * self.profile.hidden * self.profile.element_bytes

    def products_s(self) -> float:
        total = self.machine.product_s(self.profile.once_flops, 1)
        for stream, cost in self.profile.streams.items():
            tokens = self.profile.tokens(self.layout, stream)
            total += self.machine.product_s(tokens * cost.split_flops / self.spec.tensor, tokens, self.precision)
            total += self.machine.product_s(tokens * cost.whole_flops, tokens)
        return total

    def attention_s(self) -> float:
        queries = self.own_tokens * self.spec.ulysses
        flops = 4.0 * queries * self.layout.num_tokens * self.heads.queries * self.profile.head_dim
        per_turn = self.layout.num_tokens / self.spec.ring
        return self.profile.num_attentions * self.machine.attention_s(flops, min(queries, per_turn))

    def elementwise_s(self) -> float:
        passes: float = EAGER_PASSES if self.offloaded_blocks else ELEMENTWISE_PASSES
        passes = passes / (2 if self.spec.tensor > 1 else 1)  # about half of them are inside split layers
        passes = FAST_PASSES if self._is_fast else passes
        passes += self._layout_passes() / self.spec.tensor
        return self.profile.num_attentions * passes * self.hidden_bytes / self.machine.copy_bytes_per_s

    @property
    def _is_fast(self) -> bool:
        """True if the engine would run the hand-ordered step: with whole weights, not in int8."""
        is_supported = self.precision in ("native", "fp8") and not self.spec.divides_weights
        is_supported = is_supported and not self.offloaded_blocks
        return self.profile.has_fast_path and self.machine.fast_path and is_supported

    @property
    def _exchanges_beside_products(self) -> bool:
        return self._is_fast and self.spec.context == self.spec.ulysses

    def _layout_passes(self) -> float:
        """Return the copies (read + write) that reorder q, k, v and out for an exchange.

        A ring merges in float32, outside compiled code: 34 bytes per element and turn, where a pass moves 2.
        """
        passes = 0.0
        if self.spec.ulysses > 1:
            padding = self.heads.all_queries * self.spec.tensor / self.profile.num_heads
            passes += (FAST_ULYSSES_PASSES if self._exchanges_beside_products else 14) * padding
        passes += 4 + 4 * self.spec.allgather_kv if self.spec.allgather_kv > 1 else 0
        passes += 4 + 17 * (self.spec.ring - 1) if self.spec.ring > 1 else 0
        return passes

    def exchange_s(self) -> float:
        """Return the time of exchanges inside the blocks that nothing hides."""
        per_block_s = self._ulysses_s() + self._gather_s() + self._ring_s()
        return self.profile.num_attentions * per_block_s + self._tensor_s()

    def _ulysses_s(self) -> float:
        sizes = (self.query_bytes + 2 * self.key_bytes, self.query_bytes) if self.spec.ulysses > 1 else ()
        shown = FAST_SHOWN if self._exchanges_beside_products else 1.0
        return shown * sum(self.machine.exchange_s("all_to_all", self.spec.ulysses, size) for size in sizes)

    def _gather_s(self) -> float:
        return self.machine.exchange_s("all_gather", self.spec.allgather_kv, 2 * self.key_bytes)

    def _ring_s(self) -> float:
        """Return the part of each next share's transfer that attention over the current share does not hide."""
        if self.spec.ring == 1:
            return 0.0
        transfer_s = self.machine.exchange_s("rotation", self.spec.ring, 2 * self.key_bytes)
        turn_s = self.attention_s() / self.profile.num_attentions / self.spec.ring
        return (self.spec.ring - 1) * max(transfer_s - turn_s, 0.0)

    def _tensor_s(self) -> float:
        if self.spec.tensor == 1:
            return 0.0
        size_bytes = 0.0
        for stream, cost in self.profile.streams.items():
            tokens = self.profile.tokens(self.layout, stream)
            size_bytes += tokens * (cost.reduced_features * self.profile.element_bytes + 4 * cost.num_norms)
        num = self.profile.num_reductions
        return num * self.machine.exchange_s("all_reduce", self.spec.tensor, size_bytes / num)

    def handing_on_s(self) -> float:
        """Return the time to send the hidden state from one stage of a pipeline to the next."""
        return self.machine.exchange_s("rotation", self.spec.pipeline, self.hidden_bytes)

    def prediction_s(self) -> float:
        """Return the time to gather the prediction and pass it to the other stages."""
        size_bytes = self.own_tokens * self.profile.out_features * self.profile.element_bytes
        gathered_s = self.machine.exchange_s("all_gather", self.spec.context, size_bytes)
        return gathered_s + self.machine.exchange_s("all_gather", self.spec.pipeline, size_bytes * self.spec.context)

    def guidance_s(self) -> float:
        size_bytes = self.layout.num_tokens * self.profile.out_features * self.profile.element_bytes
        return self.machine.exchange_s("all_gather", self.spec.guidance, size_bytes)

    def weight_bytes(self) -> float:
        """Return a rank's share of the weights on its device, once all are loaded.

        Quantised layers replace the original ones. The loaded values of weights that additions change stay as well.
        Offloaded blocks take the memory of two, one of which is copied while the other runs.
        """
        changed = self.profile.changed_weight_bytes / self.spec.tensor
        blocks = (self._block_bytes() + changed) / self.spec.pipeline
        whole = self.profile.weight_bytes - self.profile.block_weight_bytes + blocks
        return whole - self._offloaded_share * blocks + self._buffer_bytes()

    def streaming_s(self) -> float:
        """Return the time to copy the offloaded blocks of one forward from the host."""
        offloaded_bytes = self._offloaded_share * self._block_bytes() / self.profile.num_modules
        return offloaded_bytes / self.machine.host_bytes_per_s

    def host_bytes(self) -> float:
        """Return the host memory of the offloaded blocks of all modules."""
        return self._offloaded_share * (self._block_bytes() + self.profile.changed_weight_bytes)

    @property
    def _offloaded_share(self) -> float:
        return self.offloaded_blocks / max(1, self.profile.num_repeated)

    def _block_bytes(self) -> float:
        """Return the bytes of a rank's share of all blocks, in the precision of steps."""
        split = self.profile.split_weight_bytes / self.spec.tensor
        if self.precision != "native":
            split /= self.profile.element_bytes
        return self.profile.block_weight_bytes - self.profile.split_weight_bytes + split

    def _buffer_bytes(self) -> float:
        """Return the memory that offloaded blocks take turns in."""
        if not self.offloaded_blocks:
            return 0.0
        scale = self._block_bytes() / self.profile.block_weight_bytes
        return scale * OFFLOAD_BUFFERS * self.profile.largest_block_bytes * self.profile.num_modules

    def loading_bytes(self) -> float:
        """Return the most bytes of a rank's share while it is read: layers are quantised one after another."""
        one_layer = 0.0 if self.precision == "native" else QUANTISING_COPIES * self.profile.largest_weight_bytes
        return self.weight_bytes() + one_layer / self.spec.tensor

    def memory_bytes(self, *, is_alone: bool = False) -> int:
        """Return weights and activations at their widest, or the weights while they are read, whichever is more.

        Branches run one after the other. Jobs take turns, unless one ``is_alone``: the least that a step needs.
        """
        gathered = 2 * self.hidden_bytes * self.spec.allgather_kv if self.spec.allgather_kv > 1 else 0.0
        activations = LIVE_COPIES * self.hidden_bytes + gathered + self._hoisted_bytes(is_alone=is_alone)
        return int(max(self.weight_bytes() + activations, self.loading_bytes()))

    def _hoisted_bytes(self, *, is_alone: bool) -> int:
        """Return the bytes of what is computed once a job: for jobs in progress, and as inputs of a captured step.

        Ranks that divide the weights compute it in each forward, and so does a prompt's reader with offloaded blocks.
        """
        lengths, features = dict(self.layout.lengths), self.profile.hoisted_features
        numbers = sum(features.get(name, 0) * length for name, length in lengths.items())
        if not (self.spec.divides_weights or self.offloaded_blocks):
            numbers += self.profile.hoisted_numbers
        one = numbers * self.profile.element_bytes
        if not one or self.spec.divides_weights:
            return one
        of_a_job = self.profile.num_hoisted
        room = max_hoisted_bytes(self.machine.memory_bytes) // one
        of_jobs = min(JOBS_IN_PROGRESS * of_a_job * self.profile.num_modules, room)
        is_captured = one <= MAX_CAPTURED_BYTES and not self.offloaded_blocks
        return ((of_a_job if is_alone else max(of_a_job, of_jobs)) + is_captured) * one


JOBS_IN_PROGRESS = 2
"""Jobs that take turns on a team, for which memory is counted. More keep what they compute once if it has room."""


OFFLOAD_BUFFERS = 2
"""Buffers for offloaded blocks of a module: one is filled while the block in the other runs."""

QUANTISING_COPIES = 4
"""Size of a layer while it is quantised, in its own dtype: its copy from the host, and float32 values."""

CERTAIN_COPIES = 5
"""Hidden states that any block needs at once: the residual, queries, keys, values and attention's result.

The residual and the MLP's hidden layer take as much. A usual engine has ``LIVE_COPIES``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFloor:
    """The least memory that a step needs on each rank."""

    available_bytes: int
    """Memory of one rank, the smallest of the gang's."""
    weight_bytes: int
    """Weights of the whole model."""
    token_bytes: int
    """Hidden state of a token."""
    hoisted_token_bytes: int = 0
    """Memory for each token of a step on every rank, however tokens are divided."""

    def needed_bytes(self, num_tokens: int, spec: ParallelSpec) -> int:
        """Return a lower bound of the weights, the activations of one rank's tokens, and what it holds of all."""
        weights = self.weight_bytes / (spec.tensor * spec.pipeline)
        tokens = -(-num_tokens // spec.context)
        whole = self.hoisted_token_bytes * num_tokens
        return int(weights + CERTAIN_COPIES * tokens * self.token_bytes / spec.tensor + whole)

    def check(self, num_tokens: int, spec: ParallelSpec) -> None:
        """Raise ``FieldError`` for a step that cannot fit, with the bytes needed and available."""
        needed = self.needed_bytes(num_tokens, spec)
        if needed > self.available_bytes:
            static = self.needed_bytes(0, spec)
            raise FieldError(
                f"a step of {num_tokens} tokens needs {needed / 2**30:.1f} GiB on each rank at least, "
                f"{static / 2**30:.1f} of them for weights, and a rank has {self.available_bytes / 2**30:.1f} GiB: ask "
                "for a smaller size or fewer frames, or serve the model with more ranks that share a step",
                "size",
            )
