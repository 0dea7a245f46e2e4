"""Attention of one block as three moments (send, attend, collect), so that other work fits between them.

Dims: L my tokens, B batch, R = L × B rows (batch innermost), H heads, D head dim, W ranks, h = H / W heads of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engines.core.kernel import Kernel
from engines.core.layout import Rows as TokenRows
from engines.fast.kernels import HeadNorms, norm_and_rotate
from engines.parallel.attention import cudnn_flash, local_kernel, take_rows
from engines.parallel.collectives import Axis, start_all_to_all, wait

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q_BLHD, k_BMHD, v_BMHD) -> out_BLHD``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What is under way. ``left`` and ``memory`` are the exchange's own notes."""

    data: Tensor
    num_rows: int
    left: tuple[Any, ...] = ()
    memory: Any = None


class HeadExchange(Protocol):
    """Attention over the tokens of a whole team, cut into the pieces between which a block may do something else.

    ``adds_bias``: ``send`` writes all of q, k and v anew, and can add their bias for nothing on the way.
    """

    adds_bias: bool

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> Exchanged:
        """Normalise and turn q and k, and start sending them and v. ``qkv`` may be overwritten.

        The caller has other work to do before ``attend``, and again before ``collect``.
        """
        ...

    def attend(self, sent: Exchanged) -> Exchanged:
        """Attention on what has arrived, and the start of the way back."""
        ...

    def collect(self, attended: Exchanged) -> Tensor:
        """My rows of the result: groups ``x_GRC`` of columns, in the order of the heads."""
        ...


@runtime_checkable
class SendsRuns(Protocol):
    """A ``HeadExchange`` that can send one run of rows before the others are there (with nothing beside it)."""

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """``send`` for the rows from ``start`` to ``stop``: whole tokens. ``norms`` are those of all rows."""
        ...

    def sent(self, qkv_R3HD: Tensor, batch: int) -> Exchanged:
        """What ``send`` would have returned, when every row was sent and the current stream has waited for it."""
        ...


class LocalHeads:
    """No exchange: q and k are normalised in place and attention reads the product's result where it lies."""

    adds_bias = False

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> Exchanged:
        rows, _, heads, dim = qkv_R3HD.shape
        qkv_LB3HD = qkv_R3HD.view(rows // batch, batch, 3, heads, dim)
        norm_and_rotate(qkv_R3HD, norms, qkv_LB3HD)
        return Exchanged(data=qkv_LB3HD, num_rows=rows)

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        self.send(qkv_R3HD[start:stop], batch, norms.run(start, stop, batch))

    def sent(self, qkv_R3HD: Tensor, batch: int) -> Exchanged:
        rows, _, heads, dim = qkv_R3HD.shape
        return Exchanged(data=qkv_R3HD.view(rows // batch, batch, 3, heads, dim), num_rows=rows)

    def attend(self, sent: Exchanged) -> Exchanged:
        return Exchanged(data=attend_tokens_first(self._attend, sent.data), num_rows=sent.num_rows)

    def collect(self, attended: Exchanged) -> Tensor:
        return attended.data.reshape(1, attended.num_rows, -1)


class UlyssesHeads:
    """An all-to-all each way (arXiv:2309.14509), on the communicator's own stream.

    Layouts are chosen so that nothing is copied but the last step: q, k and v are written as they are sent
    (destination, token, batch, which, head, D), attention reads what arrives through strides and writes what goes back.
    """

    adds_bias = True

    def __init__(self, attend: Attend, axis: Axis) -> None:
        self._attend, self._axis = attend, axis

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> Exchanged:
        rows, _, heads, dim = qkv_R3HD.shape
        world = self._axis.size
        assert heads % world == 0, f"{heads} heads cannot be divided over {world} ranks"
        sent_WLB3hD = qkv_R3HD.new_empty(world, rows // batch, batch, 3, heads // world, dim)
        norm_and_rotate(qkv_R3HD, norms, sent_WLB3hD.permute(1, 2, 3, 0, 4, 5))
        return Exchanged(data=start_all_to_all(sent_WLB3hD, self._axis), num_rows=rows)

    def attend(self, sent: Exchanged) -> Exchanged:
        qkv_LB3HD = wait(sent.data).flatten(0, 1)
        out_LBHD = attend_tokens_first(self._attend, qkv_LB3HD).contiguous()
        out = out_LBHD.view(self._axis.size, sent.num_rows, -1)
        return Exchanged(data=start_all_to_all(out, self._axis), num_rows=sent.num_rows)

    def collect(self, attended: Exchanged) -> Tensor:
        return wait(attended.data)


def attend_tokens_first(attend: Attend, qkv_LB3HD: Tensor) -> Tensor:
    """``out_LBHD``; on CUDA without copies, in and out."""
    q_BLHD, k_BLHD, v_BLHD = (qkv_LB3HD[:, :, which].transpose(0, 1) for which in range(3))
    return attend(q_BLHD, k_BLHD, v_BLHD).transpose(0, 1)


def join_columns(x_GRC: Tensor) -> Tensor:
    """``x_RC``; no copy if there is one group."""
    columns = x_GRC.unbind(0)
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def local_attention(device: torch.device, dtype: torch.dtype, key_rows: TokenRows | None = None) -> Attend:
    """The fastest local attention whose log-sum-exp nobody needs, over the given rows of the keys (None: all)."""
    kernel = local_kernel(device, dtype)
    attend = _cudnn_out if kernel is cudnn_flash else without_lse(kernel)
    if key_rows is None:
        return attend
    return lambda q_BLHD, k_BMHD, v_BMHD: attend(q_BLHD, take_rows(k_BMHD, key_rows), take_rows(v_BMHD, key_rows))


def without_lse(kernel: Kernel) -> Attend:
    return lambda q_BLHD, k_BMHD, v_BMHD: kernel(q_BLHD, k_BMHD, v_BMHD)[0]


def _cudnn_out(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
    q_BHLD, k_BHMD, v_BHMD = (x.transpose(1, 2) for x in (q_BLHD, k_BMHD, v_BMHD))
    out_BHLD: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q_BHLD, k_BHMD, v_BHMD, None, False)[0]
    return out_BHLD.transpose(1, 2)
