"""Clips decoded in chunks of frames and in bands of rows equal diffusers' own decoding of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from pipelines.blocks import decoder as decoder_module
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.blocks.footprint import ForwardMeter
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.vae import chunks
from pipelines.vae.chunks import decode_bands, decode_chunks, decodes_in_chunks, margins, skip_unread_cache
from tests.pipelines.support.checkpoints import tiny, tiny_cosmos, tiny_hunyuan, tiny_ltx
from tests.pipelines.support.references.video import Clip
from tests.pipelines.vae.support.vaes import VAES, copies, decibels

NUM_LATENT_FRAMES = 4
NUM_ROWS = 31
"""Rows of latents: enough that a band is cut on both of its sides, and uneven ones."""


def latents_like(channels: int) -> Tensor:
    return torch.randn(1, channels, NUM_LATENT_FRAMES, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_chunks_are_the_whole_bit_by_bit(name: str) -> None:
    vae = VAES[name]()
    assert decodes_in_chunks(vae)
    whole = vae.decode(latents_like(4), return_dict=False)[0]
    assert whole.std() > 0.01
    parts = list(decode_chunks(vae, latents_like(4)))
    assert [chunk.shape[2] for chunk in parts] == [1, 4, 4, 4]
    assert torch.equal(torch.cat(parts, 2), whole)
    alone = [next(decode_chunks(vae, latent)) for latent in torch.split(latents_like(4), 1, dim=2)]
    assert not torch.allclose(alone[1][:, :, -1], parts[1][:, :, -1]), "frames do not depend on those before"


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_a_single_frame_has_the_same_bits_without_a_cache(name: str, num_layers: int) -> None:
    """It is a picture, or its layers, which the auto-encoder decodes one by one."""
    vae = VAES[name]()
    vae.enable_slicing()
    picture = torch.cat([one[:, :, :1] + layer for layer, one in enumerate([latents_like(4)] * num_layers)])
    whole, kept_bytes = vae.decode(picture, return_dict=False)[0], peak_bytes(vae, picture)
    clip = vae.decode(latents_like(4), return_dict=False)[0]
    skip_unread_cache(vae)
    assert torch.equal(vae.decode(picture, return_dict=False)[0], whole)
    assert torch.equal(vae.decode(picture).sample, whole)
    assert torch.equal(vae.decode(latents_like(4), return_dict=False)[0], clip)
    assert peak_bytes(vae, picture) < 0.8 * kept_bytes


def peak_bytes(vae: Any, latents_BCFHW: Tensor) -> int:
    """Return the memory of a decode beside the weights; the meter's attention has no values."""
    with ForwardMeter() as meter:
        vae.decode(latents_BCFHW)
    return meter.peak_bytes


def test_who_tiles_pictures_itself_decodes_whole() -> None:
    vae = tiny.wan_vae()
    vae.enable_tiling()
    assert not decodes_in_chunks(vae)


@torch.no_grad()
def test_who_is_told_to_tile_later_decodes_whole() -> None:
    vae = tiny.wan_vae()
    skip_unread_cache(vae)
    vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    tiled = DecoderOutput(sample=torch.ones(1))
    with patch.object(vae, "tiled_decode", lambda z, return_dict: tiled):
        assert vae.decode(latents_like(4)[:, :, :1], return_dict=False)[0] is tiled.sample


CLIPS: Mapping[str, tuple[Callable[[Path], Path], int]] = MappingProxyType(
    {
        "wan": (tiny.wan, NUM_LATENT_FRAMES),
        "cosmos with sound": (tiny_cosmos.cosmos_with_sound, NUM_LATENT_FRAMES),
        "ltx": (tiny_ltx.ltx, 1),
        "hunyuan": (tiny_hunyuan.hunyuan_video, NUM_LATENT_FRAMES),
    }
)


def decoder_and_latents(folder: Path) -> tuple[BlocksDecoder, Mapping[str, Any], MediaRequest]:
    """Return a decoder, finished latents and their request."""
    request = Clip(make=tiny.wan, reference=lambda *_: {}, num_latent_frames=NUM_LATENT_FRAMES).request(folder)
    pipeline = load_pipeline(Checkpoint(folder))
    return pipeline.decoder, pipeline.denoise(request), request


@pytest.mark.parametrize("name", CLIPS)
def test_frames_and_sound_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    make, num_chunks = CLIPS[name]
    decoder, latents, request = decoder_and_latents(make(tmp_path))
    whole = decoder.decode_all(latents, request)
    assert len(whole.frames_FHWC) == request.num_frames
    parts = list(decoder.decode_chunks(latents, request))
    assert len(parts) == num_chunks
    np.testing.assert_array_equal(np.concatenate([chunk.frames_FHWC for chunk in parts]), whole.frames_FHWC)
    assert [chunk.sound for chunk in parts[:-1]] == [None] * (num_chunks - 1)
    assert (parts[-1].sound is None) == (whole.sound is None) == (name != "cosmos with sound")
    if whole.sound is not None:
        assert parts[-1].sound is not None
        np.testing.assert_array_equal(parts[-1].sound.samples_CT, whole.sound.samples_CT)


def test_a_chunk_comes_before_the_next_is_decoded(tiny_wan: Path) -> None:
    decoder, latents, request = decoder_and_latents(tiny_wan)
    calls: list[Any] = []
    decoder._pipeline.vae.decoder.register_forward_hook(lambda *call: calls.append(call))
    seen = [len(calls) for _ in decoder.decode_chunks(latents, request)]
    assert seen == [1, 2, 3, 4]


def test_the_next_chunk_is_issued_on_its_stream_before_a_chunk_is_copied(tiny_wan: Path) -> None:
    """CPU streams stand for a GPU's: they have no effect, but one of them is the current one."""
    decoder, latents, request = decoder_and_latents(tiny_wan)
    main, aside = torch.cpu.current_stream(), torch.cpu.Stream()
    decoder.__dict__["_aside"] = aside
    calls: list[Any] = []
    decoder._pipeline.vae.decoder.register_forward_hook(lambda *_: calls.append(torch.cpu.current_stream()))
    original, copies_on = decoder_module.to_frames, list[Any]()

    def watched(*args: Any) -> Any:
        copies_on.append((torch.cpu.current_stream(), len(calls)))
        return original(*args)

    with patch.object(decoder_module, "to_frames", watched):
        parts = []
        for chunk in decoder.decode_chunks(latents, request):
            assert torch.cpu.current_stream() is main
            parts.append(chunk.frames_FHWC)
    assert copies_on == [(aside, 2), (aside, 3), (aside, 4), (aside, 4)]
    assert calls == [main] * NUM_LATENT_FRAMES
    np.testing.assert_array_equal(np.concatenate(parts), decoder.decode(latents, request))


@pytest.mark.gpu
def test_a_gpu_that_goes_on_meanwhile_makes_the_frames_of_the_whole(tiny_wan: Path) -> None:
    """A copy that did not wait for its chunk would show in some of the repetitions."""
    _, latents, request = decoder_and_latents(tiny_wan)
    decoder = Checkpoint(tiny_wan, "cuda").decoder()
    whole_FHWC = decoder.decode(latents, request)
    for _ in range(20):
        parts = [chunk.frames_FHWC for chunk in decoder.decode_chunks(latents, request)]
        np.testing.assert_array_equal(np.concatenate(parts), whole_FHWC)


def test_a_guardrail_sees_the_whole_clip(tiny_wan: Path) -> None:
    decoder, latents, request = decoder_and_latents(tiny_wan)
    decoder._pipeline.requires_safety_checker = True
    assert [len(chunk.frames_FHWC) for chunk in decoder.decode_chunks(latents, request)] == [request.num_frames]


def tall_latents() -> Tensor:
    return torch.randn(1, 4, 2, NUM_ROWS, 3, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def joined(vae: Any, count: int) -> Tensor:
    return torch.cat(list(decode_bands(vae, tall_latents(), copies(vae.decoder, count))), 2)


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_bands_of_clips_are_the_rows_of_the_whole(name: str) -> None:
    vae = VAES[name]()
    whole = vae.decode(tall_latents(), return_dict=False)[0]
    for count in (2, 3):
        assert joined(vae, count).shape == whole.shape
        assert decibels(joined(vae, count), whole) > 100
    narrow = tuple(margin // 2 for margin in margins(vae.decoder))
    with patch.object(chunks, "margins", lambda _: narrow):
        assert decibels(joined(vae, 2), whole) < 80, "rows around a band do not matter"


def test_margins_are_small_where_the_work_is() -> None:
    """The published layout has three residual blocks a level, the first three followed by one convolution."""
    with torch.device("meta"):
        decoder = diffusers.AutoencoderKLWan().decoder
    assert margins(decoder) == (14, 12, 10, 8, 13, 11, 9, 7, 11, 9, 7, 5, 7, 5, 3, 1)


def test_a_decoder_is_the_same_after_a_band() -> None:
    vae = VAES["wan 2.1"]()
    with torch.no_grad():
        whole = vae.decode(tall_latents(), return_dict=False)[0]
        next(decode_bands(vae, tall_latents(), copies(vae.decoder, 2)))
        assert torch.equal(vae.decode(tall_latents(), return_dict=False)[0], whole)


@pytest.mark.parametrize(
    ("name", "rows"), [("wan 2.1", (14, 15, 29, 30, 44, 45, 90)), ("wan 2.2", (7, 8, 14, 15, 22, 23, 45))]
)
@torch.no_grad()
def test_the_rows_of_a_clip_say_how_many_devices_decode(
    name: str, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of latents is 8 rows of pixels for Wan 2.1, and 16 for Wan 2.2."""
    counts: list[int] = []

    def none(vae: Any, latents: Tensor, decoders: Sequence[Any]) -> Iterator[Tensor]:
        counts.append(len(decoders))
        return iter(())

    monkeypatch.setattr(chunks, "decode_bands", none)
    vae = VAES[name]()
    for num_rows in rows:
        latents = torch.zeros(1, 4, 2, num_rows, 3)
        list(decode_chunks(vae, latents, copies(vae.decoder, 3)))
        list(decode_chunks(vae, latents))
    assert counts[::2] == [1, 1, 1, 2, 2, 3, 3]
    assert set(counts[1::2]) == {1}
