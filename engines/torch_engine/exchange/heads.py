"""Attention over the tokens of a team: on one rank alone, and through one all-to-all each way.

Dims: L own tokens, B batch, R = L × B rows (batch innermost), H heads, D head dim, W ranks, h heads of one rank: H / W,
rounded up. If W × h exceeds H, the last ranks exchange and attend surplus heads of undefined contents, whose results
are dropped.

If prompts are padded, the padding is masked. The mask is a tensor of the step, so one captured step serves all prompts
of the same padded length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.core.attention import Kernel, heads_of_one
from engines.core.layout import Rows as TokenRows
from engines.core.layout import TokenLayout
from engines.core.torch_private import cudnn_attention
from engines.fast.kernels import HeadNorms, join_columns, norm_and_rotate
from engines.parallel.collectives import Axis, start_all_to_all, wait
from engines.parallel.key_rows import valid_rows
from engines.parallel.local_attention import crop_keys, cudnn_flash, take_rows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q_BLHD, k_BMHD, v_BMHD) -> out_BLHD``."""
MaskedAttend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The same with ``mask_BM``, or None."""


class LocalHeads:
    """No exchange: q and k are normalised in place, and attention reads the GEMM's result directly."""

    adds_bias = False

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> LocalSent:
        self.send_run(qkv_R3HD, batch, norms, 0, qkv_R3HD.shape[0])
        return self.send_rest(qkv_R3HD, batch, norms)

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        run_R3HD = qkv_R3HD[start:stop]
        norm_and_rotate(run_R3HD, norms.run(start, stop, batch), _by_token(run_R3HD, batch))

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> LocalSent:
        return LocalSent(kernel=self._attend, qkv_LB3HD=_by_token(qkv_R3HD, batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSent:
    """Heads that are attended where they are."""

    kernel: Attend
    """Attention of one rank."""
    qkv_LB3HD: Tensor
    """Queries, keys and values, normed and rotated in place."""

    def attend(self) -> LocalAttended:
        return LocalAttended(out_LBHD=attend_tokens_first(self.kernel, self.qkv_LB3HD))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalAttended:
    """The result of attention on one rank."""

    out_LBHD: Tensor
    """All heads of all tokens."""

    def collect(self) -> Tensor:
        length, batch, *_ = self.out_LBHD.shape
        return self.out_LBHD.reshape(1, length * batch, -1)


class UlyssesHeads:
    """An all-to-all of whole tensors each way (arXiv:2309.14509), on the communicator's own stream.

    Layouts avoid copies except the last one: q, k and v are written as they are sent (destination, token, batch, which,
    head, D). Attention reads the received tensor through strides and writes the tensor to send back.
    """

    adds_bias = True

    def __init__(self, attend: Attend, axis: Axis) -> None:
        self._attend, self._axis = attend, axis

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> UlyssesSent:
        rows, _, heads, dim = qkv_R3HD.shape
        world = self._axis.size
        sent_WLB3hD = qkv_R3HD.new_empty(world, rows // batch, batch, 3, heads_of_one(heads, world), dim)
        norm_and_rotate(qkv_R3HD, norms, sent_WLB3hD.permute(1, 2, 3, 0, 4, 5))
        pending_WLB3hD = start_all_to_all(sent_WLB3hD, self._axis)
        return UlyssesSent(
            kernel=self._attend, axis=self._axis, pending_WLB3hD=pending_WLB3hD, num_rows=rows, num_columns=heads * dim
        )

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Send nothing: all rows go together, in ``send_rest``."""

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> UlyssesSent:
        return self.send(qkv_R3HD, batch, norms)


@dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesSent:
    """A running all-to-all of queries, keys and values."""

    kernel: Attend
    """Attention of one rank."""
    axis: Axis
    """Ranks that exchange heads."""
    pending_WLB3hD: Tensor
    """Values by source: its tokens, batch, which of q, k and v, own heads, D."""
    num_rows: int
    """Own rows, which the way back has again."""
    num_columns: int
    """Heads × D, of all heads."""

    def attend(self) -> UlyssesAttended:
        out_LBhD = attend_tokens_first(self.kernel, wait(self.pending_WLB3hD).flatten(0, 1)).contiguous()
        out_WRC = out_LBhD.view(self.axis.size, self.num_rows, -1)
        return UlyssesAttended(pending_WRC=start_all_to_all(out_WRC, self.axis), num_columns=self.num_columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesAttended:
    """A running all-to-all of results."""

    pending_WRC: Tensor
    """Values by rank of the heads: own rows, columns of its heads."""
    num_columns: int
    """Heads × D, of all heads."""

    def collect(self) -> Tensor:
        return drop_surplus(wait(self.pending_WRC), self.num_columns)


def drop_surplus(x_GRC: Tensor, num_columns: int) -> Tensor:
    """Return the columns of real heads: all groups unchanged, or one group without the surplus."""
    groups, _, columns = x_GRC.shape
    return x_GRC if groups * columns == num_columns else join_columns(x_GRC)[None, :, :num_columns]


def attend_tokens_first(attend: Attend, qkv_LB3HD: Tensor) -> Tensor:
    """Return ``out_LBHD``; on CUDA without copies, in and out."""
    q_BLHD, k_BLHD, v_BLHD = (qkv_LB3HD[:, :, which].transpose(0, 1) for which in range(3))
    return attend(q_BLHD, k_BLHD, v_BLHD).transpose(0, 1)


def attention_of(kernel: Kernel, key_rows: TokenRows | None = None) -> Attend:
    """Return a local kernel's attention without log-sum-exp, over the given rows of the keys (None: all)."""
    attend = cudnn_out if kernel is cudnn_flash else without_lse(kernel)
    if key_rows is None:
        return attend
    return lambda q_BLHD, k_BMHD, v_BMHD: attend(q_BLHD, take_rows(k_BMHD, key_rows), take_rows(v_BMHD, key_rows))


def masked_attention_of(kernel: Kernel, key_rows: TokenRows | None = None) -> MaskedAttend:
    """Return the same with a mask of all keys, or None, as its last argument."""
    attend, masked = attention_of(kernel, key_rows), crop_keys(kernel, key_rows)

    def run(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, mask_BM: Tensor | None) -> Tensor:
        if mask_BM is None:
            return attend(q_BLHD, k_BMHD, v_BMHD)
        return masked(q_BLHD, k_BMHD, v_BMHD, mask_BM=mask_BM)[0]

    return run


def whole_masked_attention(kernel: Kernel, layout: Callable[[], TokenLayout]) -> MaskedAttend:
    """Return the same over the unpadded keys of all ranks, by the layout when it runs."""

    def run(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, mask_BM: Tensor | None) -> Tensor:
        now = layout()
        return masked_attention_of(kernel, valid_rows(now, 0, now.num_chunks))(q_BLHD, k_BMHD, v_BMHD, mask_BM)

    return run


def without_lse(kernel: Kernel) -> Attend:
    return lambda q_BLHD, k_BMHD, v_BMHD: kernel(q_BLHD, k_BMHD, v_BMHD)[0]


def _by_token(qkv_R3HD: Tensor, batch: int) -> Tensor:
    """Return the view ``qkv_LB3HD``."""
    return qkv_R3HD.view(-1, batch, *qkv_R3HD.shape[1:])


def cudnn_out(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
    """Run cuDNN's attention, which is faster without writing the log-sum-exp."""
    q_BHLD, k_BHMD, v_BHMD = (x.transpose(1, 2) for x in (q_BLHD, k_BMHD, v_BMHD))
    out_BHLD: Tensor = cudnn_attention(q_BHLD, k_BHMD, v_BHMD, None, False)[0]
    return out_BHLD.transpose(1, 2)


class KeyMask:
    """The keys that the next run attends to: ``mask_M`` in the key order of one rank's attention."""

    def __init__(self, layout: TokenLayout, chunks: range) -> None:
        """Mask keys of ``chunks``: the ranks whose keys are present when attention asks for the mask."""
        self._layout, self._chunks = layout, chunks
        self.mask_M: Tensor | None = None

    def in_order(self, mask_N: Tensor) -> Tensor:
        """Return ``mask_M`` from ``mask_N`` of all streams' tokens; padding of a chunk is masked."""
        names = tuple(name for name, _ in self._layout.lengths)
        chunks = (self._layout.cut_streams(mask_N, dim=0, streams=names, index=index) for index in self._chunks)
        return torch.cat(list(chunks))

    def attend(self, kernel: Kernel) -> Attend:
        def masked(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
            assert self.mask_M is not None, "a step with padded prompts must set its key mask"
            mask_BM = self.mask_M.expand(q_BLHD.shape[0], -1)
            return kernel(q_BLHD, k_BMHD, v_BMHD, mask_BM=mask_BM)[0]

        return masked
