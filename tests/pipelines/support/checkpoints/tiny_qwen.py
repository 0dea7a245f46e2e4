"""Small Qwen-Image, its editors, and Qwen-Image 2.1."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.checkpoints.parts import ALPHABET, HIDDEN, chat_tokenizer, flow, saved, shake


def qwen_auto_encoder(z_dim: int = 4, num_channels: int = 3, num_halvings: int = 3) -> Any:
    from diffusers import AutoencoderKLQwenImage

    sizes = {"base_dim": 8, "z_dim": z_dim, "dim_mult": [1, 1, 2, 2][-num_halvings - 1 :], "num_res_blocks": 1}
    sizes["input_channels"] = num_channels
    scales = {
        "latents_mean": [0.0] * z_dim,
        "latents_std": [1.0] * z_dim,
    }  # the decoding blocks scale the latents in place
    return shake(AutoencoderKLQwenImage(**sizes, **scales, temperal_downsample=[False, True, True][:num_halvings]))


def qwen(path: Path, kind: str = "QwenImagePipeline", vae: Any = None, **changes: Any) -> Path:
    import diffusers

    vae = vae or qwen_auto_encoder()

    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * vae.config.z_dim,
        out_channels=vae.config.z_dim,
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
        vae=vae,
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
    """Write an editor like 2511: pictures are modulated as at time zero."""
    return qwen(path, "QwenImageEditPlusPipeline", zero_cond_t=True)


def qwen_layered(path: Path) -> Path:
    """Write a model with more channels in latents than in pixels, which the classic pipeline tells apart by this."""
    settings = {"use_additional_t_cond": True, "use_layer3d_rope": True}
    return qwen(path, "QwenImageLayeredPipeline", qwen_auto_encoder(z_dim=6, num_channels=4), **settings)


def qwen_controlled(path: Path) -> Path:
    """Write a model with a control network of one layer, for a transformer of two."""
    from diffusers import QwenImageControlNetModel, QwenImageControlNetPipeline, QwenImagePipeline

    parts = QwenImagePipeline.from_pretrained(qwen(path)).components
    network = QwenImageControlNetModel.from_transformer(
        parts["transformer"], num_layers=1, attention_head_dim=16, num_attention_heads=4
    )
    QwenImageControlNetPipeline(**parts, controlnet=shake(network, seed=5)).save_pretrained(path)
    return path


class QwenProcessor:
    """Stands for ``Qwen2VLProcessor``, which cannot be made without torchvision."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=64 * 64)
        self.tokenizer = vision_tokenizer()

        self.batch_decode = self.tokenizer.batch_decode

    def __call__(self, *, text: str | list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        given = self.images(images, return_tensors=return_tensors)
        pad, (words,) = VISION[2], [text] if isinstance(text, str) else text
        for grid in given["image_grid_thw"]:
            words = words.replace(pad, "\0" * (int(grid.prod()) // self.images.merge_size**2), 1)
        ids = self.tokenizer([words.replace("\0", pad)], padding=padding, return_tensors=return_tensors)
        return BatchFeature({**ids, **given})


EYE = 16
"""Side in pixels of a token of Qwen-Image 2.1's encoder; four of them replace four latent tokens."""
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def vision_tokenizer() -> Any:
    letters = chat_tokenizer()
    letters.add_special_tokens({"additional_special_tokens": list(VISION)})
    return letters


TALKS_UNTIL = string.ascii_uppercase
"""Characters that end the description of a picture, so that it is a few words."""


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
    model: Any = shake(Qwen2_5_VLForConditionalGeneration(config))
    model.generation_config.eos_token_id = [ALPHABET.index(letter) for letter in TALKS_UNTIL]
    return model


def qwen21(path: Path, *, causal_condition: bool = True) -> Path:
    from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel

    torch.manual_seed(0)
    sizes = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 2, 2], "num_res_blocks": 1}
    vae = AutoencoderKLQwenImage21(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        context_in_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
        causal_condition=causal_condition,
    )
    parts = {"scheduler": flow(), "vae": shake(vae), "transformer": shake(transformer), "text_encoder": qwen3_vl()}
    index = {
        "_class_name": "QwenImage21Pipeline",
        **saved(parts, path),
        "processor": ["transformers", "Qwen3VLProcessor"],
    }
    (path / "model_index.json").write_text(json.dumps(index))
    return path


TURBO_SIGMAS = [1.0, 0.7, 0.3]


def qwen21_turbo(path: Path) -> Path:
    """Write the same with the schedule it was distilled for, which is a setting of its pipeline."""
    index = qwen21(path) / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "sample_sigmas": TURBO_SIGMAS}))
    return path


class Qwen3Processor:
    """Stands for ``Qwen3VLProcessor``, which cannot be made without torchvision."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.images = Qwen2VLImageProcessorPil(patch_size=EYE, min_pixels=EYE**2, max_pixels=64 * 64)
        self.tokenizer = vision_tokenizer()

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        return [self.tokenizer.encode(message["content"][0]["text"]) for message in messages]

    def __call__(self, *, text: list[str], images: Any = None, **options: Any) -> Any:
        from transformers import BatchFeature

        if images is None:
            return self.tokenizer(text, **options)
        seen, pad, (words,) = self.images(images, return_tensors="pt"), VISION[2], text
        for grid in seen["image_grid_thw"]:
            words = words.replace(pad, "\0" * (int(grid.prod()) // self.images.merge_size**2), 1)
        ids = self.tokenizer([words.replace("\0", pad)], **options)
        kinds = (ids["input_ids"] == self.tokenizer.convert_tokens_to_ids(pad)).long()
        return BatchFeature({**ids, **seen, "mm_token_type_ids": kinds})


def qwen3_vl(num_layers: int = 2) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": num_layers}
    rope = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 3, 3]}
    words = {"vocab_size": len(ALPHABET) + len(VISION), "hidden_size": HIDDEN, "intermediate_size": 64}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    vision = {**eyes, "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": EYE}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, map(vision_tokenizer().convert_tokens_to_ids, VISION), strict=True))
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config={**words, **heads, "rope_parameters": rope}, vision_config=vision, **ids)
    return shake(Qwen3VLForConditionalGeneration(config))
