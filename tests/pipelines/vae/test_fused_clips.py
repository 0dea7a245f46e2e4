"""Fused decoders of clips equal diffusers' own, in float32 and in half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipelines.blocks import compilation
from pipelines.blocks.footprint import ForwardMeter
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from pipelines.vae import fused_clips
from pipelines.vae.chunks import ChunkedVae, decode_bands, decode_chunks, skip_unread_cache
from pipelines.vae.fused_clips import CausalResnet, PairedResnet, fuse_clip_decoder, is_supported_clip_decoder
from tests.pipelines.support.checkpoints import tiny, tiny_ltx, tiny_minimax
from tests.pipelines.vae.support.vaes import RESIDUAL, SIZES, VAES, copies, decibels, decoded, error

NUM_LATENT_FRAMES = 5
NUM_ROWS = 31
"""Rows of latents: enough that a band is cut on both of its sides."""
NAMES = tuple(VAES)


def noise(batch: int = 1, num_frames: int = NUM_LATENT_FRAMES, rows: int = 5) -> Tensor:
    return torch.randn(batch, 4, num_frames, rows, 6, generator=torch.Generator().manual_seed(1))


def shaken(name: str) -> Any:
    """Return an auto-encoder whose vectors differ from zeros and ones, which hide faults."""
    vae = VAES[name]()
    generator = torch.Generator().manual_seed(2)
    for part, weight in vae.decoder.named_parameters():
        if weight.squeeze().ndim == 1:
            weight.data.copy_(float("gamma" in part) + 0.2 * torch.randn(weight.shape, generator=generator))
    return vae


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return diffusers' auto-encoder, and one with the same weights whose decoder is fused."""
    plain = shaken(name)
    fused = copy.deepcopy(plain)
    assert is_supported_clip_decoder(fused.decoder)
    fuse_clip_decoder(fused.decoder, dtype)
    return plain, fused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "fused_dtype"), [(torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)])
def test_estimates_count_fused_weights(name: str, dtype: torch.dtype, fused_dtype: torch.dtype) -> None:
    plain = VAES[name]().to(dtype)
    fused = copy.deepcopy(plain)
    fuse_clip_decoder(fused.decoder, fused_dtype)
    before, after = (sum(weight.nbytes for weight in vae.decoder.parameters()) for vae in (plain, fused))
    assert compilation.compiled_bytes(plain.to("meta")) == after - before


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_clip_is_that_of_diffusers(name: str) -> None:
    """Two clips are decoded at once, whole and in chunks."""
    plain, fused = pair(name)
    expected = decoded(plain, noise(batch=2))
    assert expected.std() > 0.1
    kinds = {type(part).__name__ for part in fused.decoder.modules()}
    assert not [kind for kind in kinds if kind.endswith(("ResidualBlock", "AttentionBlock", "Resample"))]
    assert {"CausalResnet", "PairedResnet"} <= kinds
    for pixels in (decoded(fused, noise(batch=2)), torch.cat(list(decode_chunks(fused, noise(batch=2))), 2)):
        assert pixels.dtype is torch.float32
        assert error(pixels, expected) < 5e-6


@pytest.mark.parametrize(
    ("in_time", "num_single"), [([False, False, False], 4), ([True, False, False], 3), ([True, True, False], 2)]
)
@torch.no_grad()
def test_frames_are_paired_only_after_an_upsampling_in_time(in_time: list[bool], num_single: int) -> None:
    """The decoder's first stage is the last of these. Before it a latent frame is one frame, which has no pair."""
    torch.manual_seed(0)
    plain = diffusers.AutoencoderKLWan(**SIZES, temperal_downsample=in_time).eval().requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_clip_decoder(fused.decoder, torch.float32)
    assert error(decoded(fused, noise()), decoded(plain, noise())) < 5e-6
    paired = [any(isinstance(part, PairedResnet) for part in block.modules()) for block in fused.decoder.up_blocks]
    assert paired == [False] * num_single + [True] * (4 - num_single)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_single_frame_is_that_of_diffusers_without_work_on_zeros(name: str) -> None:
    plain, fused = pair(name)
    skip_unread_cache(fused)
    latents, flops = noise(num_frames=1), []
    assert error(decoded(fused, latents), decoded(plain, latents)) < 5e-6
    for vae in (plain, fused):
        with ForwardMeter() as meter:
            decoded(vae, latents)
        flops.append(meter.flops)
    assert flops[1] < 0.5 * flops[0], "two of three frames that a convolution reads are zeros"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("each", [2, 3, 4])
@torch.no_grad()
def test_several_latent_frames_at_a_time_make_the_same_clip(name: str, each: int) -> None:
    """The first is alone, since it is one frame of pixels and all others are four."""
    plain, fused = pair(name)
    hidden_BCFHW = fused.post_quant_conv(noise())
    cache, parts = [None] * 100, []
    for start in (0, *range(1, NUM_LATENT_FRAMES, each)):
        latents = hidden_BCFHW[:, :, start : start + each if start else 1]
        first = {"first_chunk": start == 0} if name.startswith("wan") else {}
        parts.append(fused.decoder(latents, feat_cache=cache, feat_idx=[0], **first))
    one_by_one = [None] * 100
    expected = [
        plain.decoder(
            hidden_BCFHW[:, :, index : index + 1],
            feat_cache=one_by_one,
            feat_idx=[0],
            **({"first_chunk": index == 0} if name.startswith("wan") else {}),
        )
        for index in range(NUM_LATENT_FRAMES)
    ]
    assert error(torch.cat(parts, 2), torch.cat(expected, 2)) < 5e-6


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bands_of_rows_are_those_of_diffusers(name: str) -> None:
    plain, fused = pair(name)
    latents = noise(num_frames=3, rows=NUM_ROWS)
    bands = torch.cat(list(decode_bands(fused, latents, copies(fused.decoder, 3))), 2)
    assert decibels(bands, decoded(plain, latents)) > 100


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_nearer_to_float32_than_that_of_diffusers(name: str, dtype: torch.dtype) -> None:
    plain, fused = pair(name, dtype)
    expected = decoded(plain, noise())
    half = shaken(name).to(dtype)
    assert error(decoded(fused, noise()), expected) < error(decoded(half, noise().to(dtype)), expected) < 0.1


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_values_beyond_float16_are_decoded_in_float16(name: str) -> None:
    """Residual blocks add up to values that grow with their weights; their norms hide this size."""
    plain = shaken(name)
    blocks = [part for part in plain.decoder.modules() if type(part).__name__.endswith("ResidualBlock")]
    largest: list[float] = []
    hooks = [block.register_forward_hook(lambda *call: largest.append(float(call[-1].abs().max()))) for block in blocks]
    decoded(plain, noise())
    factor = 2e5 / max(largest)
    for weight in [plain.decoder.conv_in.weight, *(block.conv2.weight for block in blocks)]:
        weight.mul_(factor)
    expected = decoded(plain, noise())
    assert largest[-1] > 2 * torch.finfo(torch.float16).max
    for hook in hooks:
        hook.remove()
    fuse_clip_decoder(plain.decoder, torch.float16)
    assert error(decoded(plain, noise()), expected) < 0.02


@pytest.mark.parametrize("num_bands", [1, 2])
@torch.no_grad()
def test_layers_stay_in_channels_last_memory(num_bands: int) -> None:
    """A copy to another layout takes as long as a norm."""
    _, fused = pair("wan 2.2")
    decoders, copied = copies(fused.decoder, num_bands), list[bool]()

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], options: Any) -> None:
        copied.append(not inputs[0].is_contiguous(memory_format=torch.channels_last_3d))

    for part in decoders[-1].modules():
        if isinstance(part, CausalResnet | PairedResnet):
            part.register_forward_pre_hook(watch, with_kwargs=True)
    list(decode_bands(fused, noise(num_frames=3, rows=NUM_ROWS), decoders))
    assert copied
    assert not any(copied)


def allocate_split(x: Any, weight_C: Tensor, earlier_BFHWC: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Allocate what ``split_frames`` returns."""
    batch, sizes = len(earlier_BFHWC), earlier_BFHWC.shape[2:]
    num_pairs = x.shape[1] // 2 if isinstance(x, Tensor) else len(x[0]) // batch
    return earlier_BFHWC.new_empty(4, batch * num_pairs, *sizes), earlier_BFHWC.new_empty(batch, 2, *sizes)


def allocate_interleaved(parts_NHWE: Tensor, bias_C: Tensor) -> Tensor:
    num, height, width = (size - (dim > 0) for dim, size in enumerate(parts_NHWE.shape[:3]))
    return parts_NHWE.new_empty(num, 2 * height, 2 * width, len(bias_C))


ALLOCATIONS: dict[str, Callable[..., Any]] = {
    "pixel_norm": lambda *_, **__: None,
    "add_residual": lambda x, *_: x,
    "merge_frames": lambda products, bias, residual: torch.empty_like(residual),
    "split_frames": allocate_split,
    "interleave": allocate_interleaved,
}
"""The fused passes on "meta". They allocate their results only, like Triton's; the plain ones allocate more."""


PUBLISHED: tuple[dict[str, Any], ...] = ({}, {"base_dim": 160, "decoder_base_dim": 256, **RESIDUAL, "z_dim": 48})
"""Sizes of Wan 2.1 and 2.2."""


@pytest.mark.parametrize("options", PUBLISHED)
@torch.no_grad()
def test_decodes_take_no_more_memory_than_those_of_diffusers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are published, in bfloat16: estimates count diffusers' own decoder."""
    with torch.device("meta"):
        plain = diffusers.AutoencoderKLWan(**options).to(torch.bfloat16).requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_clip_decoder(fused.decoder, torch.bfloat16)
    for name, allocate in ALLOCATIONS.items():
        monkeypatch.setattr(fused_clips, name, allocate)
    latents_BCFHW, peaks = torch.empty(1, plain.config.z_dim, 3, 30, 52, device="meta", dtype=torch.bfloat16), []
    for vae in (plain, fused):
        chunked = ChunkedVae(vae)
        with ForwardMeter() as meter:
            for _ in range(3):
                chunked.decode(latents_BCFHW)
        peaks.append(meter.peak_bytes)
    assert 0 < peaks[1] <= peaks[0]


@torch.no_grad()
def test_a_prepared_decoder_makes_the_frames_of_the_plain_one(tiny_wan: Path) -> None:
    checkpoint = Checkpoint(tiny_wan)
    request = checkpoint.defaults.request(Size(width=64, height=48, num_frames=13))
    latents = checkpoint.first_latents(request)
    plain, quick = checkpoint.decoder(), checkpoint.decoder(compiled=True)
    assert is_supported_clip_decoder(plain._pipeline.vae.decoder)
    assert any(isinstance(part, CausalResnet) for part in quick._pipeline.vae.decoder.modules())
    with quick.compile_calls():
        quick.decode_all(latents, request)
    expected = plain.decode(latents, request)
    parts = [media.frames_FHWC for media in quick.decode_chunks(latents, request)]
    assert len(parts) > 1
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1)
    np.testing.assert_array_equal(np.concatenate(parts), quick.decode(latents, request))


@pytest.mark.parametrize(
    ("make", "compiled", "num_calls"),
    [(tiny.wan, True, 3), (tiny.wan, False, 0), (tiny.flux, False, 0), (tiny_ltx.ltx2_few_layers, True, 2)],
)
def test_kernels_of_a_fused_decoder_are_compiled_by_a_small_clip(
    make: Callable[[Path], Path], compiled: bool, num_calls: int, tmp_path: Path
) -> None:
    """The first latent frame, and frames with one and with two before them, run different kernels."""
    decoder, calls = Checkpoint(make(tmp_path)).decoder(compiled=compiled), list[Any]()
    decoder._pipeline.vae.decoder.register_forward_hook(lambda *call: calls.append(call))
    decoder.warm_kernels()
    assert len(calls) == num_calls


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decoder.compile is for .* neither noise nor time, and this model's is Auto"):
        Checkpoint(tiny_minimax.minimax_h3(tmp_path)).decoder(compiled=True)


@torch.no_grad()
def test_float32_becomes_float16_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution in TF32 reads eleven bits of each value, and so does one in float16."""
    plain, vae = shaken("wan 2.1"), shaken("wan 2.1")
    narrow = copy.deepcopy(vae).to(torch.bfloat16)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    assert [compilation.compile_decoder(one) for one in (vae, narrow)] == [(), ()]
    monkeypatch.undo()
    dtypes = [{weight.dtype for weight in one.decoder.parameters()} for one in (vae, narrow)]
    assert dtypes == [{torch.float16}, {torch.bfloat16}]
    assert decoded(vae, noise()).dtype is torch.float32
    assert error(decoded(vae, noise()), decoded(plain, noise())) < 5e-3
