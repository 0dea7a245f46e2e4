"""The training models call their parts exactly like diffusers' pipelines, so training matches inference."""

import random
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from safetensors.torch import load_file

from training import evaluate
from training.flux_shapes.data import LONG_LENGTH
from training.flux_shapes.model import POOLED_DIM, TEXT_DIM, image_ids
from training.flux_shapes.train import start as start_flux
from training.latents import pack
from training.shapes.captions import caption
from training.shapes.scenes import training_scene
from training.shapes.tokens import MAX_LENGTH
from training.wan_shapes.train import start as start_wan

FLUX, WAN = evaluate.CHECKPOINTS / "flux-shapes", evaluate.CHECKPOINTS / "wan-shapes"


def _captions() -> list[str]:
    rng = random.Random(0)
    return [*(caption(training_scene(rng), rng) for _ in range(3)), ""]


def _ids(tokenizer: object, texts: list[str]) -> torch.Tensor:
    padded = tokenizer(texts, padding="max_length", max_length=MAX_LENGTH, truncation=True)  # type: ignore[operator]
    return torch.tensor(padded["input_ids"])


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative error; ours runs in bfloat16 autocast, theirs in float32."""
    return float((ours - theirs).norm() / theirs.norm())


def test_flux_text_equals_the_pipeline() -> None:
    model, (clip_tokenizer, t5_tokenizer) = start_flux(FLUX)
    pipeline = FluxPipeline.from_pretrained(FLUX, torch_dtype=torch.float32)
    texts = _captions()
    sequence, pooled, _ = pipeline.encode_prompt(texts, None, max_sequence_length=MAX_LENGTH)
    with torch.no_grad():
        ours = model.text(_ids(clip_tokenizer, texts), _ids(t5_tokenizer, texts))
    assert _error(ours[0], pooled) < 0.02
    assert _error(ours[1], sequence) < 0.02


def test_flux_text_of_diffusers_own_length_equals_the_pipeline() -> None:
    model, tokenizers = start_flux(FLUX)
    pipeline = FluxPipeline.from_pretrained(FLUX, torch_dtype=torch.float32)
    texts = _captions()
    ids = [_ids(tokenizer, texts) for tokenizer in tokenizers]
    padding = torch.full((len(texts), LONG_LENGTH - MAX_LENGTH), tokenizers[1].pad_token_id)
    with torch.no_grad():
        sequence, _, _ = pipeline.encode_prompt(texts, None)
        ours = model.text(ids[0], torch.cat([ids[1], padding], 1))[1]
    assert ours.shape == sequence.shape
    assert _error(ours, sequence) < 0.02


def test_flux_packing_equals_the_pipeline() -> None:
    latents = torch.randn(2, 16, 12, 8)
    torch.testing.assert_close(pack(latents), FluxPipeline._pack_latents(latents, 2, 16, 12, 8))
    theirs = FluxPipeline._prepare_latent_image_ids(2, 6, 4, "cpu", torch.float32)
    torch.testing.assert_close(image_ids(12, 8), theirs)


def test_flux_velocity_is_what_the_pipeline_asks_its_transformer_for() -> None:
    model, _ = start_flux(FLUX)
    latents, sigma, guidance = torch.randn(2, 16, 12, 8), torch.tensor([0.3, 0.8]), torch.tensor([1.0, 4.0])
    pooled, sequence = torch.randn(2, POOLED_DIM), torch.randn(2, MAX_LENGTH, TEXT_DIM)
    with torch.no_grad():
        ours = model.velocity(latents, sigma, guidance, (pooled, sequence))
        theirs = model.transformer(
            hidden_states=FluxPipeline._pack_latents(latents, 2, 16, 12, 8),
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=sigma,
            guidance=guidance,
            img_ids=FluxPipeline._prepare_latent_image_ids(2, 6, 4, "cpu", torch.float32),
            txt_ids=torch.zeros(MAX_LENGTH, 3),
        ).sample
    torch.testing.assert_close(ours, theirs)


def test_wan_text_equals_the_pipeline() -> None:
    model, tokenizer = start_wan(WAN)
    pipeline = WanPipeline.from_pretrained(WAN, torch_dtype=torch.float32)
    texts = _captions()
    sequence, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=MAX_LENGTH)
    longer, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=LONG_LENGTH)
    with torch.no_grad():
        ours = model.text(_ids(tokenizer, texts))
        ours_longer = model.text(_ids(tokenizer, texts), LONG_LENGTH)
    assert _error(ours, sequence) < 0.02
    assert ours_longer.shape == longer.shape == (len(texts), LONG_LENGTH, TEXT_DIM)
    assert _error(ours_longer, longer) < 0.02


def test_both_checkpoints_together_are_small() -> None:
    files = [file for folder in (FLUX, WAN) for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files if file.parent.name != "recipes") <= 28e6


@pytest.mark.parametrize("path", [FLUX, WAN], ids=["flux-shapes", "wan-shapes"])
def test_a_checkpoint_is_half_precision_and_has_a_card(path: Path) -> None:
    weights = [load_file(file) for file in path.rglob("*.safetensors")]
    assert {tensor.dtype for file in weights for tensor in file.values()} == {torch.float16}
    assert "apache-2.0" in (path / "README.md").read_text().lower()
