"""Tiny checkpoints of Cosmos 3, random weights, in diffusers' layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import ALPHABET, chat_tokenizer, multistep, shake
from tests.pipelines.support.checkpoints.tiny import wan_vae

VISION_START = "<|vision_start|>"
"""The token with which the pipeline ends prompts."""


def cosmos(path: Path, *, sound: bool = False, **more: Any) -> Path:
    """Write a small Cosmos 3 Nano; one latent value is 8x8 pixels and 4 frames."""
    import diffusers

    diffusers.Cosmos3OmniPipeline(
        transformer=_transformer(**(SOUND if sound else {}), **more),
        text_tokenizer=_tokenizer(),
        vae=wan_vae(),
        scheduler=multistep(),
        sound_tokenizer=_sound_tokenizer() if sound else None,
        enable_safety_checker=False,
    ).save_pretrained(path)
    return path


SOUND_DIM, RATE = 6, 4000
SOUND = {"sound_gen": True, "sound_dim": SOUND_DIM, "sound_latent_fps": 25.0}
EDGE: dict[str, Any] = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}

SIGMAS = [1.0, 0.6]


def cosmos_distilled(path: Path) -> Path:
    """Write a model with two steps of its own schedule and a modular index: each step draws new noise."""
    from diffusers import Cosmos3DistilledModularPipeline, FlowMatchEulerDiscreteScheduler

    index = cosmos(path) / "model_index.json"
    index.write_text(index.read_text().replace("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"))
    FlowMatchEulerDiscreteScheduler(stochastic_sampling=True).save_pretrained(path / "scheduler")
    pipeline = Cosmos3DistilledModularPipeline(pretrained_model_name_or_path=str(path))
    pipeline.update_components(distilled_sigmas=SIGMAS, enable_safety_checker=False)
    index.unlink()
    pipeline.save_pretrained(str(path), overwrite_modular_index=True)
    return path


cosmos_with_sound = partial(cosmos, sound=True)
cosmos_edge = partial(cosmos, **EDGE)


def _transformer(**more: Any) -> Any:
    from diffusers import Cosmos3OmniTransformer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_axes_dim": (4, 2, 2)}
    latents = {"latent_channel": 4, "latent_patch_size": 2, "patch_latent_dim": 16}
    return shake(Cosmos3OmniTransformer(**sizes, **heads, **latents, vocab_size=len(ALPHABET) + 1, **more))


def _tokenizer() -> Any:
    letters = chat_tokenizer()
    letters.add_special_tokens({"additional_special_tokens": [VISION_START]})
    return letters


def _sound_tokenizer() -> Any:
    from diffusers.models.autoencoders.autoencoder_cosmos3_audio import Cosmos3AVAEAudioTokenizer

    return shake(
        Cosmos3AVAEAudioTokenizer(
            sampling_rate=RATE,
            hop_size=160,
            vocoder_input_dim=SOUND_DIM,
            dec_dim=8,
            dec_c_mults=(1, 2, 4),
            dec_strides=(4, 5, 8),
            encoder_enabled=False,
        )
    )
