"""Tiny checkpoints of models that take pictures. As published, a latent value is 8x8 pixels: diffusers' blocks bring
pictures to multiples of 16 whatever the auto-encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.tiny import ALPHABET, clip, shake, t5, tokenizer
from tests.pipelines.support.tiny_models import HIDDEN
from tests.pipelines.support.tiny_models import _chat_tokenizer as chat_tokenizer
from tests.pipelines.support.tiny_models import _qwen3 as qwen3

PARTS = "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
CHAT_PARTS = "{% for message in messages %}" + PARTS + "{% endfor %}"

STAGES = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
KINDS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def auto_encoder(num_channels: int) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    scales = {"scaling_factor": 0.36, "shift_factor": 0.12}
    return shake(AutoencoderKL(**STAGES, **KINDS, **scales, latent_channels=num_channels))


def flow(**changes: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, "use_dynamic_shifting": True, **changes})


def flux(path: Path, kind: str = "FluxPipeline") -> Path:
    """FLUX.1-dev, or ``FluxKontextPipeline``, whose parts are the same."""
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    getattr(diffusers, kind)(
        scheduler=flow(),
        vae=auto_encoder(4),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5("T5"),
        tokenizer_2=tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def flux_kontext(path: Path) -> Path:
    return flux(path, "FluxKontextPipeline")


def flux2_auto_encoder() -> Any:
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    vae = shake(AutoencoderKLFlux2(**STAGES, **KINDS, latent_channels=4))
    vae.bn.running_mean.uniform_(-0.5, 0.5)
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def flux2_transformer(*, guidance_embeds: bool) -> Any:
    from diffusers import Flux2Transformer2DModel

    return shake(
        Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=3 * HIDDEN,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        )
    )


def flux2_dev(path: Path) -> Path:
    from diffusers import Flux2Pipeline

    Flux2Pipeline(
        scheduler=flow(),
        vae=flux2_auto_encoder(),
        text_encoder=mistral3(),
        tokenizer=parts_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=True),
    ).save_pretrained(path)
    return path


def flux2_klein(path: Path, *, is_distilled: bool = True) -> Path:
    from diffusers import Flux2KleinPipeline

    Flux2KleinPipeline(
        scheduler=flow(),
        vae=flux2_auto_encoder(),
        text_encoder=qwen3(num_layers=28),
        tokenizer=chat_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=False),
        is_distilled=is_distilled,
    ).save_pretrained(path)
    return path


def flux2_klein_base(path: Path) -> Path:
    return flux2_klein(path, is_distilled=False)


def mistral3() -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text = MistralConfig(
        vocab_size=len(ALPHABET), hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=31, **heads
    )
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, patch_size=4, image_size=16
    )
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)
    return shake(Mistral3ForConditionalGeneration(config))


def parts_tokenizer() -> Any:
    """For messages in parts. The published one is inside a processor of pictures, which needs torchvision."""
    letters = chat_tokenizer()
    letters.chat_template = CHAT_PARTS
    return letters


def qwen_auto_encoder() -> Any:
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(0)
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
    scales = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}  # the decoding blocks scale the latents in place
    return shake(AutoencoderKLQwenImage(**sizes, **scales, temperal_downsample=[False, True, True]))


def qwen(path: Path, kind: str = "QwenImagePipeline", **changes: Any) -> Path:
    import diffusers

    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
        **changes,
    )
    is_editor = kind != "QwenImagePipeline"
    parts: dict[str, Any] = {"processor": None} if is_editor else {}
    getattr(diffusers, kind)(
        scheduler=flow(),
        vae=qwen_auto_encoder(),
        text_encoder=qwen_vl(),
        tokenizer=vision_tokenizer(),
        transformer=shake(transformer),
        **parts,
    ).save_pretrained(path)
    if is_editor:
        index = path / "model_index.json"
        parts = {**json.loads(index.read_text()), "processor": ["transformers", "Qwen2VLProcessor"]}
        index.write_text(json.dumps(parts))
    return path


def qwen_edit(path: Path) -> Path:
    return qwen(path, "QwenImageEditPipeline")


def qwen_edit_plus(path: Path) -> Path:
    """As of 2511: pictures are modulated as at time zero."""
    return qwen(path, "QwenImageEditPlusPipeline", zero_cond_t=True)


class QwenProcessor:
    """What ``Qwen2VLProcessor`` does, which needs torchvision even to be made."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=64 * 64)
        self.tokenizer = vision_tokenizer()

    def __call__(self, *, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        given = self.images(images, return_tensors=return_tensors)
        pad, (words,) = VISION[2], text
        for grid in given["image_grid_thw"]:
            words = words.replace(pad, "\0" * (int(grid.prod()) // self.images.merge_size**2), 1)
        ids = self.tokenizer([words.replace("\0", pad)], padding=padding, return_tensors=return_tensors)
        return BatchFeature({**ids, **given})


VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def vision_tokenizer() -> Any:
    letters = chat_tokenizer()
    letters.add_special_tokens({"additional_special_tokens": list(VISION)})
    return letters


def qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, end, image, video = (vision_tokenizer().convert_tokens_to_ids(name) for name in VISION)
    text = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "vocab_size": len(ALPHABET) + len(VISION),
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "patch_size": 4, "window_size": 16}, **ids)
    torch.manual_seed(0)
    return shake(Qwen2_5_VLForConditionalGeneration(config))


def z_image(path: Path) -> Path:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=6,
        n_kv_heads=6,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    ZImagePipeline(
        scheduler=flow(),
        vae=auto_encoder(16),
        text_encoder=qwen3(num_layers=2).model,
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path
