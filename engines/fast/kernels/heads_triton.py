"""Triton version of ``heads.py``: one program a row and projection, all heads of it in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engines.core.heads import heads_of_one
from engines.fast.kernels.records import HeadNorms


@triton.jit
def _norm_rotate(
    qkv_ptr, out_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, first_rows, weight_seg, bias_which, batch, row_stride,
    which_stride, num_heads, heads_1, heads_2, out_start, out_token, out_batch, out_which, out_0, out_1, out_2, eps,
    TO_PEERS: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    token = row // batch
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, 2 * PAIRS)
    inside = (heads < num_heads)[:, None]
    source = row * row_stride + which * which_stride + heads[:, None] * (2 * PAIRS) + dims[None, :]
    values = tl.load(qkv_ptr + source, inside, 0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + which * bias_which + heads[:, None] * (2 * PAIRS) + dims[None, :], inside, 0.0)
        values = (values.to(tl.float32) + bias.to(tl.float32)).to(qkv_ptr.dtype.element_ty)
    if which < 2:
        x = values.to(tl.float32)
        segment = (row >= first_rows).to(tl.int64)
        weight = tl.load(weight_ptr + segment * weight_seg + which * (2 * PAIRS) + dims).to(tl.float32)
        spread = tl.rsqrt(tl.sum(x * x, 1) / (2 * PAIRS) + eps)
        x = x * spread[:, None] * weight[None, :]
        even, odd = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
        pairs = token * PAIRS + tl.arange(0, PAIRS)
        cos = tl.load(cos_ptr + pairs)[None, :]
        sin = tl.load(sin_ptr + pairs)[None, :]
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        values = tl.reshape(turned, [HEADS, 2 * PAIRS]).to(qkv_ptr.dtype.element_ty)
    # Head number h is (h // (n1 n2), h // n2 % n1, h % n2) in the destination's three head dims.
    place = (heads // (heads_1 * heads_2)) * out_0 + (heads // heads_2 % heads_1) * out_1 + (heads % heads_2) * out_2
    target = out_start + token * out_token + (row % batch) * out_batch + which * out_which + place
    if TO_PEERS:  # out_ptr is a table of addresses, one a rank; the middle head dim is the rank
        addresses = tl.load(out_ptr + heads // heads_2 % heads_1, heads < num_heads, 0)
        bases = tl.multiple_of(addresses.to(tl.pointer_type(qkv_ptr.dtype.element_ty)), 16)
        tl.store(bases[:, None] + (target[:, None] + dims[None, :]), values, inside)
    else:
        tl.store(out_ptr + target[:, None] + dims[None, :], values, inside)


def launch_norm_and_rotate(qkv_R3HD: Tensor, norms: HeadNorms, out_LB3HD: Tensor) -> None:
    rows, _, num_heads, dim = qkv_R3HD.shape
    while out_LB3HD.ndim < 7:
        out_LB3HD = out_LB3HD.unsqueeze(3)
    _, batch, _, _, heads_1, heads_2, _ = out_LB3HD.shape
    assert qkv_R3HD.stride()[2:] == (dim, 1), qkv_R3HD.stride()
    assert out_LB3HD.stride(-1) == 1, out_LB3HD.stride()
    assert dim & (dim - 1) == 0, f"head dim {dim} is not a power of two"
    in_place = out_LB3HD.data_ptr() == qkv_R3HD.data_ptr()
    token, entry, which, outer, middle, inner, _ = out_LB3HD.stride()
    _norm_rotate[(rows, 2 if in_place else 3)](
        qkv_R3HD, out_LB3HD, *_tables(qkv_R3HD, norms), batch, qkv_R3HD.stride(0), qkv_R3HD.stride(1), num_heads,
        heads_1, heads_2, 0, token, entry, which, outer, middle, inner, norms.eps,
        TO_PEERS=False, HAS_BIAS=norms.bias_3HD is not None, HEADS=triton.next_power_of_2(num_heads), PAIRS=dim // 2,
        num_warps=_num_warps(num_heads),
    )  # fmt: skip


def _num_warps(num_heads: int) -> int:
    return 8 if num_heads > 32 else 4


def _tables(qkv_R3HD: Tensor, norms: HeadNorms) -> tuple[Tensor | int, ...]:
    """Returns the kernel's arguments from ``weight_ptr`` to ``bias_which``."""
    weight_S2D, bias_3HD = norms.weight_S2D, norms.bias_3HD
    segment = weight_S2D.stride(0) if weight_S2D.shape[0] > 1 else 0
    bias, which = (qkv_R3HD, 0) if bias_3HD is None else (bias_3HD, bias_3HD.stride(0))
    return weight_S2D, bias, norms.cos_LP, norms.sin_LP, norms.first_rows, segment, which


def launch_to_peers(qkv_R3HD: Tensor, norms: HeadNorms, batch: int, addresses_W: Tensor, first_token: int) -> None:
    """Writes my rows straight into the inbox of the rank that attends to each head.

    ``addresses_W`` (int64, on the device) are the inboxes of all ranks as this one sees them; each is contiguous
    (all tokens, B, 3, H / W rounded up, D), and mine is the run of tokens from ``first_token``. What lies in the place
    of heads that are not there stays as it is.
    """
    rows, _, num_heads, dim = qkv_R3HD.shape
    each = heads_of_one(num_heads, addresses_W.shape[0])
    assert qkv_R3HD.stride()[2:] == (dim, 1), qkv_R3HD.stride()
    assert dim & (dim - 1) == 0, f"head dim {dim} is not a power of two"
    token = batch * 3 * each * dim
    _norm_rotate[(rows, 3)](
        qkv_R3HD, addresses_W, *_tables(qkv_R3HD, norms), batch, qkv_R3HD.stride(0), qkv_R3HD.stride(1), num_heads,
        addresses_W.shape[0], each, first_token * token, token, 3 * each * dim, each * dim, 0, 0, dim, norms.eps,
        TO_PEERS=True, HAS_BIAS=norms.bias_3HD is not None, HEADS=triton.next_power_of_2(num_heads), PAIRS=dim // 2,
        num_warps=_num_warps(num_heads),
    )  # fmt: skip
