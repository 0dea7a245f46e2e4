"""A picture that certainly cannot be decoded is refused with figures; what may fit is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKL

from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.vae.floor import check_fits, needed_bytes
from tests.pipelines.vae.support.live_bytes import LiveBytes
from tests.pipelines.vae.test_strips import tiny_vae

GIB = 2**30
LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def published_vae() -> AutoencoderKL:
    """FLUX's auto-encoder by its shapes alone. Its attention among latents is left out, as in ``test_rows``."""
    widths = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
    with torch.device("meta"):
        return AutoencoderKL(**LEVELS, **widths, mid_block_add_attention=False).bfloat16()


def peak_bytes(vae: AutoencoderKL, width: int, height: int) -> int:
    """What is alive at once of a decode, beside the weights."""
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (1, vae.config.latent_channels, height // scale, width // scale)
    latents_BCHW = torch.empty(shape, dtype=vae.dtype, device="meta")
    with LiveBytes() as alive, torch.no_grad():
        vae.decoder(latents_BCHW)
    return alive.peak


@pytest.mark.parametrize("size", [(64, 128), (512, 512), (2048, 2048)])
def test_no_decode_takes_less_than_it_is_said_to(size: tuple[int, int]) -> None:
    """Counted by what diffusers' own decoder allocates at once: a refusal is no guess. And it is no idle one."""
    tiny = tiny_vae(mid_block_add_attention=False).to("meta")
    for vae in (tiny, published_vae()):
        weight_bytes = sum(weight.nbytes for weight in vae.parameters())
        floor = needed_bytes(vae, *size) - weight_bytes
        peak = peak_bytes(vae, *size)
        assert 0.4 * peak < floor <= peak


def test_the_figures_are_those_of_the_picture() -> None:
    """256 channels of 2048 x 2048 pixels in bfloat16 are 2 GiB."""
    vae = published_vae()
    weight_bytes = sum(weight.nbytes for weight in vae.parameters())
    assert needed_bytes(vae, 2048, 2048) == weight_bytes + 4 * GIB
    check_fits(vae, 2048, 2048, weight_bytes + 4 * GIB)
    with pytest.raises(ValueError, match=r"2048x2048 pixels takes 4\.2 GiB at least, .* has 4\.0 GiB"):
        check_fits(vae, 2048, 2048, 4 * GIB)


def decoder_on(kind: str, decoder: BlocksDecoder, monkeypatch: pytest.MonkeyPatch) -> BlocksDecoder:
    """As if it were on a device of this kind, with a little memory."""
    monkeypatch.setattr(decoder, "_opened", SimpleNamespace(device=torch.device(kind)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**23))
    return decoder


def test_whole_decodes_on_gpus_are_refused(tiny_flux: Path, tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, clips = Checkpoint(tiny_flux), Checkpoint(tiny_wan)
    small, large = (checkpoint.defaults.request(width=side, height=side) for side in (32, 1024))
    on_gpu = decoder_on("cuda", checkpoint.decoder(), monkeypatch)
    on_gpu.check_fits(small)
    with pytest.raises(ValueError, match=r"ask for a smaller size, or serve the model with decoder\.memory_gib"):
        on_gpu.check_fits(large)
    for decoder in (checkpoint.decoder(memory_bytes=1), clips.decoder()):
        decoder_on("cuda", decoder, monkeypatch).check_fits(large)
    monkeypatch.setattr(on_gpu, "_others", (torch.device("cuda:1"),))
    on_gpu.check_fits(large)
    decoder_on("cpu", checkpoint.decoder(), monkeypatch).check_fits(large)
