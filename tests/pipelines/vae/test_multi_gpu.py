"""Decoding on several devices equals diffusers' own decoding of the whole, or fails at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.vae import chunks, layers, multi_gpu, strips
from pipelines.vae.layers import is_supported_mid_block
from pipelines.vae.multi_gpu import distribute_decoder
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.vae.support.vaes import EXACT_DB, VAES, copies, decibels, tiny_vae
from tests.pipelines.vae.test_chunks import decoder_and_latents

CPU = torch.device("cpu")


def uneven(height: int, *, batch: int = 1) -> Tensor:
    """Return latents whose rows, and so bands, differ in mean and strength."""
    latents_BCHW = torch.randn(batch, 4, height, 9, generator=torch.Generator().manual_seed(1))
    return latents_BCHW * torch.linspace(0.2, 2, height)[:, None] + torch.linspace(-1, 1, height)[:, None]


@pytest.mark.parametrize("strip_bytes", [1, 5000, strips.UNLIMITED_BYTES])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bands_of_pictures_are_the_rows_of_the_whole(count: int, strip_bytes: int) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, uneven(13, batch=2)
    bands = strips.decode_in_bands(copies(decoder, count), latents_BCHW, strip_bytes)
    assert decibels(bands, decoder(latents_BCHW)) > EXACT_DB


def test_a_middle_without_attention() -> None:
    decoder = tiny_vae(mid_block_add_attention=False).decoder
    bands = strips.decode_in_bands(copies(decoder, 2), uneven(8))
    assert decibels(bands, decoder(uneven(8))) > EXACT_DB


def test_a_shipped_model_paints_the_same() -> None:
    vae = AutoencoderKL.from_pretrained(resolve_path("flux-shapes") / "vae").requires_grad_(False)
    latents_BCHW = torch.randn(1, vae.config.latent_channels, 25, 12, generator=torch.Generator().manual_seed(1))
    assert is_supported_mid_block(vae.decoder.mid_block)
    bands = strips.decode_in_bands(copies(vae.decoder, 3), latents_BCHW)
    assert decibels(bands, vae.decoder(latents_BCHW)) > EXACT_DB


def test_bands_of_bfloat16_are_as_near_to_the_truth_as_the_whole() -> None:
    decoder, latents_BCHW = tiny_vae().decoder, uneven(16)
    truth, halves = decoder(latents_BCHW), latents_BCHW.bfloat16()
    decoder = decoder.bfloat16()
    whole_db = decibels(decoder(halves), truth)
    assert decibels(strips.decode_in_bands(copies(decoder, 2), halves), truth) > whole_db - 1


def no_edges(bands: Sequence[Tensor]) -> list[Any]:
    return [(None, None)] * len(bands)


def own_statistics(moments: Sequence[Tensor]) -> Tensor:
    return moments[0][1:]


def own_pixels(attention: Any, x_BCHW: Tensor, own_BCHW: Tensor, all_BCHW: Tensor) -> Tensor:
    return ATTENDED(attention, x_BCHW, own_BCHW, own_BCHW)


ATTENDED = layers._attend
FAULTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"_edges": no_edges, "_combine_moments": own_statistics, "_attend": own_pixels}
)


@pytest.mark.parametrize("name", FAULTS)
def test_bands_that_know_nothing_of_each_other_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_vae().decoder
    monkeypatch.setattr(layers, name, FAULTS[name])
    assert decibels(strips.decode_in_bands(copies(decoder, 2), uneven(16)), decoder(uneven(16))) < 60


def test_the_rows_say_how_many_devices_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, calls = tiny_vae().decoder, list[tuple[int, int]]()
    whole = decoder(uneven(2 * multi_gpu.MIN_BAND_ROWS))
    real = strips.decode_in_bands

    def watched(decoders: Sequence[Any], latents_BCHW: Tensor, strip_bytes: int) -> Tensor:
        calls.append((len(decoders), strip_bytes))
        return real(decoders, latents_BCHW, strip_bytes)

    monkeypatch.setattr(multi_gpu, "decode_in_bands", watched)
    least = uneven(2 * multi_gpu.MIN_BAND_ROWS)
    fewer = least[:, :, 1:]
    as_ever = decoder(fewer)
    half_bytes = strips.peak_bytes(decoder, least) // 2
    for limit_bytes, strip_bytes in ((None, strips.UNLIMITED_BYTES), (half_bytes, strips.UNLIMITED_BYTES), (1, 2**26)):
        divided = copies(decoder, 3)
        multi_gpu.distribute_pictures(divided, limit_bytes, lambda _: False)
        assert decibels(divided[0](least), whole) > EXACT_DB
        assert calls.pop() == (2, strip_bytes)
        assert torch.equal(divided[0](fewer), as_ever)
        assert not calls
        decoder.__dict__.pop("forward")


def test_what_one_device_is_ready_for_stays_there_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, calls = tiny_vae().decoder, list[int]()
    real = strips.decode_in_bands

    def watched(decoders: Sequence[Any], *args: Any) -> Tensor:
        calls.append(len(decoders))
        return real(decoders, *args)

    monkeypatch.setattr(multi_gpu, "MIN_BAND_ROWS", 2)
    monkeypatch.setattr(multi_gpu, "decode_in_bands", watched)
    ready, other = uneven(8), uneven(9)
    num_bytes = strips.peak_bytes(decoder, ready)
    for limit_bytes, half_bytes, counts in (
        *((None, num_bytes, [2]), (num_bytes, 0, [2])),
        *((num_bytes - 1, num_bytes, [2, 2]), (None, num_bytes - 1, [2, 2])),
    ):
        calls.clear()
        monkeypatch.setattr(multi_gpu, "half_memory_bytes", lambda _, half_bytes=half_bytes: half_bytes)
        divided = copies(decoder, 2)
        multi_gpu.distribute_pictures(divided, limit_bytes, lambda sample: sample.shape == ready.shape)
        for latents_BCHW in (ready, other):
            divided[0](latents_BCHW)
        assert calls == counts
        decoder.__dict__.pop("forward")


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny pictures and clips be enough for three devices."""
    monkeypatch.setattr(multi_gpu, "MIN_BAND_ROWS", 2)
    monkeypatch.setattr(chunks, "MIN_BAND_PIXELS", 8)


def assert_rounded_alike(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours.astype(int), theirs.astype(int), atol=1)
    assert (ours != theirs).mean() < 0.01


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_a_picture_is_that_of_one_device(tiny_flux: Path, few_rows: None, memory_bytes: int | None) -> None:
    checkpoint = Checkpoint(tiny_flux)
    request = checkpoint.defaults.request(width=32, height=64)
    latents = checkpoint.first_latents(request)
    divided = checkpoint.decoder(memory_bytes=memory_bytes, others=("cpu", "cpu"))
    assert_rounded_alike(divided.decode(latents, request), checkpoint.decoder().decode(latents, request))


def test_a_clip_is_that_of_one_device(tiny_wan: Path, few_rows: None) -> None:
    plain, latents, request = decoder_and_latents(tiny_wan)
    divided = BlocksDecoder(plain._opened, others=[CPU, CPU])
    calls: list[int] = []
    for index, decoder in enumerate(divided._decoders):
        decoder.register_forward_hook(lambda *_, index=index: calls.append(index))
    whole_FHWC = plain.decode(latents, request)
    pieces = [media.frames_FHWC for media in divided.decode_chunks(latents, request)]
    assert calls == [0, 1, 2] * len(pieces)
    assert_rounded_alike(np.concatenate(pieces), whole_FHWC)
    assert_rounded_alike(divided.decode_all(latents, request).frames_FHWC, whole_FHWC)
    assert calls == 2 * [0, 1, 2] * len(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.2"]])
def test_a_start_with_devices_that_work_is_no_error(make: Any, dtype: torch.dtype) -> None:
    distribute_decoder(make().to(dtype), [CPU, CPU])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.1"]])
def test_two_gpus_decode_what_the_cpu_does(make: Any, few_rows: None) -> None:
    assert_decode_what_the_cpu_does(make, "cuda:1", "cuda:0", num_times=50)


@torch.no_grad()
def assert_decode_what_the_cpu_does(make: Any, own: str, other: str, num_times: int) -> None:
    """Check repeatedly: copies that do not wait for their source would show in some of the runs."""
    vae, divided = make(), make().to(own)
    shape = (1, 4, 2, 24, 4) if chunks.decodes_in_chunks(vae) else (1, 4, 24, 4)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = vae.decode(latents, return_dict=False)[0]
    distribute_decoder(divided, [torch.device(other)])
    for _ in range(num_times):
        assert decibels(divided.decode(latents.to(own), return_dict=False)[0].cpu(), whole) > 45


@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.1"]])
def test_two_times_the_cpu_decodes_what_it_does_once(make: Any, few_rows: None) -> None:
    assert_decode_what_the_cpu_does(make, "cpu", "cpu", num_times=1)


def unlike(vae: Any) -> None:
    with pytest.raises(ValueError, match=r"agree to -?\d+ dB only, and 20 are needed: leave"):
        distribute_decoder(vae, [CPU])


@pytest.mark.parametrize(("name", "fault"), [("_edges", no_edges), ("_combine_moments", own_statistics)])
def test_a_start_with_devices_that_do_not_talk_is_an_error(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, name, fault)
    unlike(tiny_vae())


def test_a_decoder_of_clips_that_looks_at_all_rows_is_refused() -> None:
    vae = VAES["wan 2.1"]()
    vae.decoder.norm_out = torch.nn.GroupNorm(2, vae.decoder.conv_out.in_channels)
    unlike(vae)


def test_others_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decoder.num_devices is for .* AutoencoderKLLTXVideo: leave the key out"):
        Checkpoint(tiny_ltx.ltx(tmp_path)).decoder(others=("cpu",))
    vae = tiny_vae()
    vae.decoder.mid_block.attentions[0].norm_q = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"decoder.num_devices is for .* AutoencoderKL: leave"):
        multi_gpu.distribute_decoder(vae, [CPU])
