"""Compare every Triton kernel with its plain version: ``python triton_check.py cpu`` (interpreter) or ``cuda``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[4]))

from engines.fast import (
    fp8_heads,
    frames,
    rotary,
    triton_fp8_heads,
    triton_frames,
    triton_group_norm,
    triton_kernels,
    triton_rotary,
)
from engines.fast.kernels import (
    HeadNorms,
    Modulation,
    add_normed,
    gated,
    group_norm,
    join_columns,
    norm_and_rotate,
    norm_modulate,
    quantize_rows,
    quantize_weight,
    scaled_norm,
)
from engines.fast.kernels import residual_norm_modulate as residual
from engines.fast.records import Edges, Pairs, QuantRows, RotaryTables, RowNorm
from engines.parallel.collectives import Axis
from engines.parallel.flash3 import attended_first, attended_order
from engines.parallel.local_attention import local_kernel
from engines.quantization.linear import FP8
from engines.torch_engine.exchange.heads import attend_tokens_first, attention_of
from engines.torch_engine.exchange.peer_heads import PeerHeads
from engines.torch_engine.exchange.peer_memory import addresses_of


def close(got: Tensor | QuantRows, expected: Tensor | QuantRows, tolerance: float = 1e-5) -> None:
    if isinstance(got, QuantRows):
        assert isinstance(expected, QuantRows)
        close(got.scale_R1.cpu(), expected.scale_R1)
        # The interpreter truncates float8 instead of rounding it.
        tolerance = 0.01 if got.values_RC.is_cuda else 0.1
        got, expected = got.dequantized(), expected.dequantized()
    assert isinstance(expected, Tensor)
    error = (got.cpu().float() - expected.float()).norm() / expected.float().norm()
    assert error <= tolerance, f"relative error {error:.2e}"


def moved(modulation: Modulation, device: str) -> Modulation:
    shift_SBC, scale_SBC = modulation.shift_SBC.to(device), modulation.scale_SBC.to(device)
    return replace(modulation, shift_SBC=shift_SBC, scale_SBC=scale_SBC)


def check_norm(device: str, *, channels: int, first: int, gates: int, segments: int, last: int = 0) -> None:
    batch, rows = 2, 10
    x, y, z = (torch.randn(rows, channels) for _ in range(3))
    vectors = torch.randn(6, segments, batch, channels)
    gate = torch.randn(gates, batch, channels)
    modulation = Modulation(shift_SBC=vectors[1], scale_SBC=vectors[4], first_rows=first, last_rows=last)
    there = moved(modulation, device)
    for quantize in (False, True):
        got = triton_kernels.launch_norm(x.to(device), (), None, there, quantize)
        close(got, norm_modulate(x, modulation, quantize=quantize))
        for updates in ((y,), (y, z)):
            x_here, x_there = x.clone(), x.clone().to(device)
            moved_updates = tuple(update.to(device) for update in updates)
            got = triton_kernels.launch_norm(x_there, moved_updates, gate.to(device), there, quantize)
            close(got, residual(x_here, updates, gate, modulation, quantize=quantize))
            close(x_there, x_here)


def check_pre_post_norm(device: str) -> None:
    batch, rows, channels, eps = 2, 10, 48, 1e-3
    x, y, gate, scale = torch.randn(rows, channels), torch.randn(rows, channels), *torch.randn(2, batch, channels)
    for quantize in (False, True):
        x_here, x_there = x.clone(), x.clone().to(device)
        got = triton_kernels.launch_scaled_norm(x_there, None, None, scale.to(device), eps, quantize)
        close(got, scaled_norm(x_here, scale, eps=eps, quantize=quantize))
        got = triton_kernels.launch_scaled_norm(x_there, y.to(device), gate.to(device), scale.to(device), eps, quantize)
        close(got, add_normed(x_here, y, gate, scale, eps=eps, quantize=quantize))
        close(x_there, x_here)


def check_heads(device: str, *, heads: int, dim: int, outer: int, inner: int) -> None:
    batch, length, first = 2, 5, 4
    qkv = torch.randn(length * batch, 3, heads, dim)
    weight, angles = torch.randn(2, 2, dim), torch.randn(length, dim // 2)
    norms = HeadNorms(weight_S2D=weight, cos_LP=angles.cos(), sin_LP=angles.sin(), first_rows=first)
    there = HeadNorms(
        weight_S2D=weight.to(device), cos_LP=norms.cos_LP.to(device), sin_LP=norms.sin_LP.to(device), first_rows=first
    )
    in_place = qkv.clone().to(device)
    triton_kernels.launch_norm_and_rotate(in_place, there, in_place.view(length, batch, 3, heads, dim))
    expected = qkv.clone()
    norm_and_rotate(expected, norms, expected.view(length, batch, 3, heads, dim))
    close(in_place, expected)
    bias = torch.randn(3, heads, dim)
    norms, there = replace(norms, bias_3HD=bias), replace(there, bias_3HD=bias.to(device))
    each = -(-heads // (outer * inner))
    here_out = torch.full((outer, inner, length, batch, 3, each, dim), float("nan"))
    there_out = here_out.clone().to(device)
    order = (2, 3, 4, 0, 1, 5, 6)
    norm_and_rotate(qkv, norms, here_out.permute(order))
    triton_kernels.launch_norm_and_rotate(qkv.to(device), there, there_out.permute(order))
    got, wanted = (out.permute(order).flatten(3, 5)[:, :, :, :heads] for out in (there_out, here_out))
    close(got, wanted)


def check_rotary(device: str, dim: int, pairs: int, *, over_all: bool, by_head: bool, interleaved: bool) -> None:
    """Check heads of any number and size in columns of wider rows; queries and keys together, and either alone.

    In 16 bits almost all values have the plain version's bits: both round after the norm.
    """
    heads, batch, length = 3, 2, 2
    narrow = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter truncates bfloat16
    features = heads * dim if over_all else dim
    angles = torch.randn((batch, heads, length, 2 * pairs) if by_head else (1, 1, length, 2 * pairs)).transpose(1, 2)
    for dtype, rounded in ((torch.float32, False), (narrow, False), (narrow, True)):
        q, k, _ = torch.randn(batch, length, 3 * heads * dim).to(dtype).chunk(3, -1)
        weights = [1 + 0.2 * torch.randn(features).to(dtype) for _ in range(2)]
        tables = RotaryTables(angles.cos()[..., ::2], angles.sin()[..., ::2], interleaved, rounded)
        there = tables._replace(cos_BLHP=tables.cos_BLHP.to(device), sin_BLHP=tables.sin_BLHP.to(device))
        for several, some in (([q, k], weights), ([k], [None])):
            norms = [RowNorm(weight, features, 1e-3, rounded) for weight in some]
            moved = [norm._replace(weight=None if norm.weight is None else norm.weight.to(device)) for norm in norms]
            results = triton_rotary.launch_heads([x.to(device) for x in several], moved, there, dim)
            for x, norm, got in zip(several, norms, results, strict=True):
                expected = rotary.plain_heads(x, norm, tables, dim)
                assert got.is_contiguous()
                close(got, expected, 1e-5 if dtype == torch.float32 else 1e-2)
                # A GPU's compiler may join a rounded product with the sum that follows, without rounding it.
                is_joined = rounded and device == "cuda"
                assert dtype == torch.float32 or is_joined or (got.cpu() == expected).float().mean() >= 0.95


def check_peers(device: str, *, heads: int, dim: int, world: int) -> None:
    """Check that every rank's rows land in its part of each inbox; all inboxes are on this device."""
    batch, length, first = 2, 5, 4
    each = -(-heads // world)
    inboxes = torch.full((world, world * length, batch, 3, each, dim), float("nan"), device=device)
    results = torch.full((world, 7, world * 6), float("nan"), device=device)
    expected, expected_results = inboxes.cpu(), results.cpu()
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    result_addresses = torch.tensor([result.data_ptr() for result in results], device=device)
    for rank in range(world):
        qkv, angles = torch.randn(length * batch, 3, heads, dim), torch.randn(length, dim // 2)
        weight = torch.randn(2, 2, dim)
        bias = torch.randn(3, heads, dim)
        norms = HeadNorms(weight_S2D=weight, cos_LP=angles.cos(), sin_LP=angles.sin(), first_rows=first, bias_3HD=bias)
        mine = expected[:, rank * length : (rank + 1) * length]
        norm_and_rotate(qkv, norms, mine.permute(1, 2, 3, 0, 4, 5))
        tables = (norms.weight_S2D.to(device), norms.cos_LP.to(device), norms.sin_LP.to(device))
        there = HeadNorms(
            weight_S2D=tables[0], cos_LP=tables[1], sin_LP=tables[2], first_rows=first, bias_3HD=bias.to(device)
        )
        triton_kernels.launch_to_peers(qkv.to(device), there, batch, addresses, rank * length)
        x = torch.randn(world, 7, 6)
        triton_kernels.push_columns(x.to(device), result_addresses, rank)
        expected_results[:, :, rank * 6 : (rank + 1) * 6] = x
    order = (1, 2, 3, 0, 4, 5)
    got, wanted = (some.permute(order).flatten(3, 4)[:, :, :, :heads] for some in (inboxes, expected))
    close(got, wanted)
    close(results, expected_results)


class OneProcessMemory:
    """Stands for ``PeerMemory``: the ranks take turns in this process and need no barrier."""

    opened: ClassVar[dict[str, list[Tensor]]] = {}

    def __init__(self, numel: int, sample: Tensor, axis: Axis, *, use: str) -> None:
        several = self.opened.setdefault(use, [sample.new_full((numel,), float("nan")) for _ in axis.ranks])
        self.views_W, self.local = tuple(several), several[axis.index]
        self.addresses_W = addresses_of(several)
        self.barrier = lambda channel: None


def check_exchange(device: str, *, world: int, heads: int, by_runs: bool) -> None:
    """Compare attention of all ranks through each other's memory with one rank's: pushed, picture first, or copied."""
    OneProcessMemory.opened.clear()
    batch, length, first, dim = 2, 5, 4, 8
    rows = length * batch
    attend = attention_of(local_kernel(device, torch.float32))
    weight, angles = torch.randn(2, 2, dim, device=device), torch.randn(world, length, dim // 2, device=device)
    inputs = torch.randn(world, rows, 3, heads, dim, device=device)
    axes = [Axis(ranks=tuple(range(world)), index=rank) for rank in range(world)]
    with patch("engines.torch_engine.exchange.peer_heads.PeerMemory") as memory:
        memory.open = OneProcessMemory
        exchanges = [PeerHeads(attend, axis, torch.device("cpu")) for axis in axes]
        norms = [
            HeadNorms(weight_S2D=weight, cos_LP=some.cos(), sin_LP=some.sin(), first_rows=first) for some in angles
        ]
        for exchange, qkv_R3HD, norm in zip(exchanges, inputs, norms, strict=True):
            for start, stop in ((first, rows), (0, first)) if by_runs else ():
                exchange.send_run(qkv_R3HD, batch, norm, start, stop)
        sent = [
            exchange.send_rest(qkv_R3HD, batch, norm) if by_runs else exchange.send(qkv_R3HD, batch, norm)
            for exchange, qkv_R3HD, norm in zip(exchanges, inputs, norms, strict=True)
        ]
        attended = [some.attend() for some in sent]
        results = [join_columns(some.collect()) for some in attended]
    normed = torch.empty(world * length, batch, 3, heads, dim)
    for rank, norm in enumerate(norms):
        here = HeadNorms(weight_S2D=weight.cpu(), cos_LP=norm.cos_LP.cpu(), sin_LP=norm.sin_LP.cpu(), first_rows=first)
        norm_and_rotate(inputs[rank].cpu(), here, normed[rank * length : (rank + 1) * length])
    expected = attend_tokens_first(attention_of(local_kernel("cpu", torch.float32)), normed)
    close(torch.cat(results), expected.flatten(0, 1).flatten(1))


def check_quantization(device: str) -> None:
    wide = torch.randn(7, 40)
    for gelu in (False, True):
        x = torch.randn(4, 9, 12)
        close(triton_kernels.launch_quantize(x.to(device), gelu=gelu), quantize_rows(x, gelu=gelu))
        close(
            triton_kernels.launch_quantize(wide[None, :, :30].to(device), gelu=gelu),
            quantize_rows(wide[:, :30], gelu=gelu),
        )
    got, expected = (blank_rows(9, 30, where) for where in (device, "cpu"))
    narrow = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter truncates bfloat16, too
    triton_kernels.launch_weights([(wide.to(device)[:, :30], narrow, got[1:8])])
    quantize_weight(wide[:, :30], narrow, expected[1:8])
    close(got, expected)
    check_weights_together(device)


def check_weights_together(device: str) -> None:
    """Check that more weights than a launch takes, of mixed sizes and dtypes, equal one-by-one launches."""
    several: list[tuple[Tensor, torch.dtype, QuantRows]] = []
    for number in range(9):
        columns, dtype = ((32, torch.float16), (30, torch.float16), (30, torch.float32))[number % 7 % 3]
        weight = torch.randn(1 + number % 3, 40, device=device).to(dtype)[:, :columns]
        several.append((weight, torch.float16, blank_rows(len(weight), columns, device)))
    with patch.object(triton_kernels, "MAX_SUMS", 2):
        triton_kernels.launch_weights(several)
    for weight, rounded, got in several:
        alone, expected = (blank_rows(len(weight), weight.shape[1], where) for where in (device, "cpu"))
        triton_kernels.launch_weights([(weight, rounded, alone)])
        assert got.values_RC.view(torch.uint8).equal(alone.values_RC.view(torch.uint8))
        assert got.scale_R1.equal(alone.scale_R1)
        quantize_weight(weight.cpu(), rounded, expected)
        close(got, expected)


def check_offsets_beyond_int32(device: str) -> None:
    """Check groups of columns, heads of several ranks, and q, k and v, each 2**30 elements apart in one memory."""
    far = torch.empty(2**31 + 100, dtype=torch.float16, device=device)  # on a CPU, few pages of it are touched
    columns = far.as_strided((3, 2, 8), (2**30, 8, 1)).copy_(torch.randn(3, 2, 8))
    close(triton_kernels.launch_quantize(columns, gelu=False), quantize_rows(columns.cpu()))
    angles = torch.randn(1, 4)
    norms = HeadNorms(weight_S2D=torch.randn(1, 2, 8), cos_LP=angles.cos(), sin_LP=angles.sin(), first_rows=1)
    there = replace(norms, **{name: getattr(norms, name).to(device) for name in ("weight_S2D", "cos_LP", "sin_LP")})
    for which, head in ((8, 2**30), (2**30, 8)):
        qkv = torch.randn(1, 3, 3, 8).half()
        got, expected = far.as_strided((1, 1, 3, 3, 8), (1, 1, which, head, 1)), torch.empty(1, 1, 3, 3, 8)
        triton_kernels.launch_norm_and_rotate(qkv.to(device), there, got)
        norm_and_rotate(qkv, norms, expected)
        close(got, expected, 1e-3)


def blank_rows(rows: int, channels: int, device: str) -> QuantRows:
    scale_R1 = torch.zeros(1, rows, device=device).t()
    return QuantRows(values_RC=torch.zeros(rows, channels, device=device).to(FP8), scale_R1=scale_R1)


def check_group_norm(device: str, *, silu: bool, has_weights: bool) -> None:
    """Check means far above the deviations, channels and pixels that fill no tile, several tiles in each part."""
    norm = nn.GroupNorm(6, 24, eps=1e-6, affine=has_weights)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    x = torch.randn(2, 24, 16, 15) + 20 * torch.randn(24, 1, 1)
    there = x.to(device, memory_format=torch.channels_last)
    with patch.multiple(triton_group_norm, TILE=64, MAX_PARTS=50), torch.no_grad():
        expected = group_norm(x, norm, silu=silu)
        got = triton_group_norm.launch_group_norm(there, norm.to(device), silu=silu)
    assert got.stride() == there.stride()
    close(got, expected)


def check_frames(device: str, channels: int) -> None:
    """Check channels that fill no tile, several tiles, and two clips; plain frames and products."""
    clip, residual = torch.randn(2, 2, 4, 3, 5, channels)
    weight, bias = torch.randn(2, channels)
    a, b, c, d = torch.randn(4, 4, 3, 5, channels)
    products = (a, b, c, d)

    def there(some: Any) -> Any:
        return tuple(map(there, some)) if isinstance(some, tuple) else some.to(device) if some is not None else None

    with patch.object(triton_frames, "TILE", 64):
        for offset, silu in ((None, True), (bias, False)):
            got, expected = (torch.zeros(2, 6, 3, 5, channels, device=where) for where in (device, "cpu"))
            frames.pixel_norm(clip, weight, expected[:, 2:], bias_C=offset, silu=silu)
            triton_frames.launch_norm(there(clip), there(weight), there(offset), got[:, 2:], silu=silu)
            close(got, expected)
            for earlier in (torch.randn(2, 1, 3, 5, channels), torch.randn(2, 2, 3, 5, channels)):
                for source in (clip, products):
                    wanted = frames.split_frames(source, weight, earlier, bias_C=offset)
                    results = triton_frames.launch_split(*there((source, weight, offset, earlier)))
                    for one, other in zip(results, wanted, strict=True):
                        close(one, other)
        merged = torch.empty_like(residual, device=device)
        triton_frames.launch_merge(there(products), there(bias), there(residual), merged)
        close(merged, frames.merge_frames(products, bias, residual))
        parts = torch.randn(3, 5, 4, 4 * channels)
        close(triton_frames.launch_interleave(*there((parts, bias))), frames.interleave(parts, bias))
        total = clip.clone().to(device)
        triton_frames.launch_add(total, *there((bias, residual)))
        close(total, clip + bias + residual)


def check_clip_frames(device: str, channels: int) -> None:
    """Check pairs of any frames of two clips, with pixels around them, and frames that exceed the places."""
    clip, weight, two = torch.randn(2, 5, 3, 4, channels), torch.randn(channels), torch.randn(2, 2, 5, 6, channels)
    products, bias = torch.randn(4, 4, 3, 4, channels), torch.randn(channels)
    edges: Edges
    for edges, before, start, number in (
        ("reflect", None, 1, 3),
        ("reflect", None, 3, 1),
        ("replicate", None, 0, 3),
        ("replicate", two, 0, 3),
        (None, None, 1, 2),
    ):
        for norm in (weight, None):
            options: Any = {"pairs": Pairs(number=number, start=start), "eps": 0.5, "edges": edges}
            wanted = frames.split_frames(clip, norm, before, **options)
            gain, earlier = (None if one is None else one.to(device) for one in (norm, before))
            results = triton_frames.launch_split(clip.to(device), gain, None, earlier, **options)
            for one, other in zip(results, wanted, strict=True):
                close(one, other)
    a, b, c, d = products
    for added in (clip, None):
        got, expected = (torch.zeros_like(clip, device=where) for where in (device, "cpu"))
        frames.merge_into(expected, (a, b, c, d), bias, added, 2)
        aside = None if added is None else added.to(device)
        triton_frames.launch_merge(tuple(products.to(device)), bias.to(device), aside, got, 2)
        close(got, expected)


def check_fp8_heads(
    device: str, *, heads: int, groups: int, dim: int, padded: int, lengths: tuple[int, int], masked: bool
) -> None:
    """Compare views of packed heads or of wider rows with the plain version. Nothing is rounded to float8 here."""
    length, num_keys = lengths
    if heads == groups and length == num_keys:
        packed_LB3HD = torch.randn(length, 3, 3, heads, dim).bfloat16()
        q, k, v = (packed_LB3HD[:, :, which].transpose(0, 1) for which in range(3))
    else:
        q, v = torch.randn(3, length, heads, dim).bfloat16(), torch.randn(3, num_keys, groups, dim).bfloat16()
        k = (torch.randn(3, num_keys, groups, 2 * dim) + 3 * torch.randn(groups, 2 * dim)).bfloat16()[..., :dim]
    order = num_attended = mask = None
    k_front, v_front = k, v
    if masked:
        mask = torch.rand(3, num_keys) > torch.tensor([[0.4], [0.7], [1.0]])  # the third picture has no keys
        order, num_attended = attended_order(mask)
        k_front, v_front, _ = attended_first(k, v, mask)
        mask = torch.arange(num_keys) < num_attended[:, None]
    inputs = [None if x is None else x.to(device) for x in (q, k, v, order, num_attended)]
    small = patch.multiple(triton_fp8_heads, TILE=512, NUM_PARTS=4)
    guard = nullcontext() if device == "cuda" else patch.object(torch.cuda, "device", MagicMock())
    with patch.object(fp8_heads, "FP8", torch.float32), guard, small:
        expected = fp8_heads.quantise_heads(q, k_front, v_front, mask, dim=padded)
        got = fp8_heads.fused_heads(*inputs, dim=padded)  # type: ignore[arg-type]
    for name, one, other in zip(expected._fields, got, expected, strict=True):
        if name in ("k_BMGD", "lse_shift_BHL"):  # the mean's sum has another order
            close(one, other)
        else:
            assert one.cpu().equal(other), name


def check_a_head_is_the_same_alone(device: str) -> None:
    """Check a batch, and a rank with fewer heads. Sums of these values depend on their order."""
    qkv = [x.to(device) for x in torch.randn(3, 2, 300, 2, 16)]
    guard = nullcontext() if device == "cuda" else patch.object(torch.cuda, "device", MagicMock())
    small = patch.multiple(triton_fp8_heads, TILE=512, NUM_PARTS=4)
    with patch.object(fp8_heads, "FP8", torch.float32), guard, small:
        several = fp8_heads.fused_heads(*qkv)
        alone = fp8_heads.fused_heads(*(x[:1, :, :1] for x in qkv))
    assert several.k_BMGD[:1, :, :1].equal(alone.k_BMGD)


def check_keys_that_are_not_finite(device: str, value: float) -> None:
    """Check that all keys of the head become NaN, which casts keep. Infinity would become 448."""
    q, k, v = torch.randn(3, 2, 70, 2, 16)
    k[1, 5, 1, 3] = value
    guard = nullcontext() if device == "cuda" else patch.object(torch.cuda, "device", MagicMock())
    with patch.object(fp8_heads, "FP8", torch.float32), guard, np.errstate(invalid="ignore"):
        got = fp8_heads.fused_heads(*(x.to(device) for x in (q, k, v))).k_BMGD.cpu()
    is_hit = torch.zeros(2, 1, 2, 1, dtype=torch.bool)
    is_hit[1, 0, 1] = True
    assert got.isnan().equal(is_hit.expand_as(got)), value


def check_all_fp8_heads(device: str) -> None:
    check_a_head_is_the_same_alone(device)
    for value in (torch.nan, torch.inf, -torch.inf):
        check_keys_that_are_not_finite(device, value)
    for dim, padded in ((10, 16), (24, 32)):
        sizes: dict[str, int] = {"dim": dim, "padded": padded}
        check_fp8_heads(device, **sizes, heads=3, groups=3, lengths=(70, 70), masked=False)
        check_fp8_heads(device, **sizes, heads=4, groups=2, lengths=(7, 133), masked=True)
    check_fp8_heads(device, heads=4, groups=1, dim=48, padded=48, lengths=(65, 3), masked=False)


def main(device: str) -> None:
    torch.manual_seed(0)
    for silu in (False, True):
        check_group_norm(device, silu=silu, has_weights=silu)
    check_norm(device, channels=48, first=4, gates=2, segments=2)
    check_norm(device, channels=96, first=4, gates=2, segments=1)
    check_norm(device, channels=64, first=0, gates=1, segments=1)
    for last in (0, 2):
        check_norm(device, channels=48, first=4, gates=3, segments=3, last=last)
    check_pre_post_norm(device)
    check_heads(device, heads=12, dim=16, outer=2, inner=2)
    check_heads(device, heads=6, dim=8, outer=1, inner=3)
    check_heads(device, heads=6, dim=8, outer=1, inner=4)
    check_rotary(device, 16, 8, over_all=True, by_head=True, interleaved=False)
    check_rotary(device, 20, 10, over_all=True, by_head=False, interleaved=True)
    check_rotary(device, 24, 9, over_all=False, by_head=False, interleaved=False)
    check_rotary(device, 12, 4, over_all=False, by_head=True, interleaved=True)
    check_quantization(device)
    check_offsets_beyond_int32(device)
    for channels in (24, 32):
        check_frames(device, channels)
        check_clip_frames(device, channels)
    check_all_fp8_heads(device)
    x = torch.randn(5, 2 * 2100)  # more columns than a program takes
    close(triton_kernels.launch_gated(x.to(device)), gated(x))
    for heads in (12, 10):
        check_peers(device, heads=heads, dim=16, world=4)
    for by_runs in (False, True):
        for heads in (4, 3):
            check_exchange(device, world=2, heads=heads, by_runs=by_runs)
    print("all kernels agree")


if __name__ == "__main__":
    main(sys.argv[1])
