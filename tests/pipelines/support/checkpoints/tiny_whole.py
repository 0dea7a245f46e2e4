"""Tiny checkpoints of pipelines without modular blocks: published architectures, random weights."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import (
    ALPHABET,
    HIDDEN,
    auto_encoder,
    chat_tokenizer,
    clip,
    flow,
    multistep,
    qwen3,
    shake,
    shifted_auto_encoder,
    t5,
    tokenizer,
)
from tests.pipelines.support.checkpoints.tiny import flux, wan_transformer, wan_vae
from tests.pipelines.support.checkpoints.tiny_unknown import sdxl

T5_WIDTH = 48
PROJECTED = "CLIPTextModelWithProjection"


def steady(**changes: Any) -> Any:
    """Return a flow scheduler without a shift by size."""
    return flow(use_dynamic_shifting=False, **changes)


def language_model(name: str, **changes: Any) -> Any:
    """Return a model of transformers, such as ``Gemma2Model``; its configuration class has the name's first word."""
    import transformers

    word = next(end for end in ("ForCausalLM", "Model") if name.endswith(end))
    config = getattr(transformers, f"{name.removesuffix(word)}Config")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(ALPHABET), "pad_token_id": 0}
    return shake(getattr(transformers, name)(config(**{**sizes, **heads, **changes})))


def chroma(path: Path) -> Path:
    from diffusers import ChromaPipeline, ChromaTransformer2DModel

    transformer = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    ChromaPipeline(
        scheduler=steady(),
        vae=shifted_auto_encoder(4, 3),
        text_encoder=t5("T5"),
        tokenizer=tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def chroma_over(path: Path) -> Path:
    """Write Chroma's image-to-image."""
    from diffusers import ChromaImg2ImgPipeline, ChromaPipeline

    folder = chroma(path / "chroma")
    ChromaImg2ImgPipeline(**ChromaPipeline.from_pretrained(folder).components).save_pretrained(path)
    return path


def sana(path: Path) -> Path:
    """Write a small Sana. One latent value is 32x32 pixels; the pipeline draws 1024x1024 and rescales."""
    from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel

    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=HIDDEN,
        sample_size=32,
    )
    stages = {
        "block_types": ("ResBlock",) * 5 + ("EfficientViTBlock",),
        "block_out_channels": (4,) * 5 + (8,),
        "qkv_multiscales": ((),) * 5 + ((5,),),
        "layers_per_block": (1,) * 6,
    }
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stages.items()}
    kinds = {"downsample_block_type": "conv", "upsample_block_type": "interpolate", "decoder_act_fns": "silu"}
    vae = AutoencoderDC(latent_channels=4, attention_head_dim=2, **both, **kinds, scaling_factor=0.41)
    SanaPipeline(
        tokenizer=chat_tokenizer(),
        text_encoder=language_model("Gemma2Model"),
        vae=shake(vae),
        transformer=shake(transformer),
        scheduler=steady(),
    ).save_pretrained(path)
    return path


def pixart_sigma(path: Path) -> Path:
    """Write a small PixArt-Sigma, which is no flow and has no callback; it draws 256x256 and rescales."""
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    transformer = PixArtTransformer2DModel(
        sample_size=32,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=T5_WIDTH,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        use_additional_conditions=False,
    )
    PixArtSigmaPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5("T5"),
        vae=auto_encoder(4, 4, scaling_factor=0.13),
        transformer=shake(transformer),
        scheduler=DPMSolverMultistepScheduler(),
    ).save_pretrained(path)
    return path


def aura_flow(path: Path) -> Path:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel

    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=T5_WIDTH,
        out_channels=4,
        pos_embed_max_size=256,
    )
    AuraFlowPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5("UMT5"),
        vae=auto_encoder(4, 3, scaling_factor=0.13),
        transformer=shake(transformer),
        scheduler=steady(shift=1.73),
    ).save_pretrained(path)
    return path


def lumina2(path: Path) -> Path:
    from diffusers import Lumina2Pipeline, Lumina2Transformer2DModel

    transformer = Lumina2Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[300, 64, 64],
        cap_feat_dim=HIDDEN,
    )
    Lumina2Pipeline(
        transformer=shake(transformer),
        scheduler=steady(),
        vae=shifted_auto_encoder(4, 4),
        text_encoder=language_model("Gemma2Model"),
        tokenizer=chat_tokenizer(),
    ).save_pretrained(path)
    return path


def cogview4(path: Path) -> Path:
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel

    transformer = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=HIDDEN,
        time_embed_dim=8,
        condition_dim=4,
        sample_size=16,
    )
    CogView4Pipeline(
        tokenizer=chat_tokenizer(),
        text_encoder=language_model("GlmModel"),
        vae=auto_encoder(4, 3, scaling_factor=0.5),
        transformer=shake(transformer),
        scheduler=flow(time_shift_type="linear", base_shift=0.25, max_shift=0.75, base_image_seq_len=256),
    ).save_pretrained(path)
    return path


def ovis_image(path: Path) -> Path:
    from diffusers import OvisImagePipeline, OvisImageTransformer2DModel

    transformer = OvisImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
    )
    OvisImagePipeline(
        scheduler=steady(),
        vae=shifted_auto_encoder(4, 3),
        text_encoder=qwen3(num_layers=2).model,
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def lumina(path: Path) -> Path:
    from diffusers import LuminaNextDiT2DModel, LuminaPipeline

    transformer = LuminaNextDiT2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        learn_sigma=True,
        qk_norm=True,
        cross_attention_dim=HIDDEN,
    )
    LuminaPipeline(
        transformer=shake(transformer),
        scheduler=steady(),
        vae=auto_encoder(4, 4, scaling_factor=0.13),
        text_encoder=language_model("GemmaModel"),
        tokenizer=chat_tokenizer(),
    ).save_pretrained(path)
    return path


def hidream(path: Path) -> Path:
    from diffusers import HiDreamImagePipeline, HiDreamImageTransformer2DModel

    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[T5_WIDTH, HIDDEN],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    HiDreamImagePipeline(
        scheduler=steady(),
        vae=shifted_auto_encoder(4, 3),
        text_encoder=clip(16, 2, PROJECTED, 128),
        tokenizer=tokenizer(128),
        text_encoder_2=clip(16, 2, PROJECTED, 128),
        tokenizer_2=tokenizer(128),
        text_encoder_3=t5("T5"),
        tokenizer_3=tokenizer(128),
        text_encoder_4=language_model("LlamaForCausalLM"),
        tokenizer_4=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def cogvideox(path: Path) -> Path:
    """Write a small CogVideoX: one latent value is 8x8 pixels of 4 frames."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=T5_WIDTH,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=226,
    )
    stages = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    CogVideoXPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5("T5"),
        vae=shake(AutoencoderKLCogVideoX(**stages)),
        transformer=shake(transformer),
        scheduler=CogVideoXDDIMScheduler(),
    ).save_pretrained(path)
    return path


def cogvideox_over(path: Path) -> Path:
    """Write CogVideoX's video-to-video."""
    from diffusers import CogVideoXPipeline, CogVideoXVideoToVideoPipeline

    folder = cogvideox(path / "cogvideox")
    CogVideoXVideoToVideoPipeline(**CogVideoXPipeline.from_pretrained(folder).components).save_pretrained(path)
    return path


def wan_over(path: Path) -> Path:
    """Write Wan's video-to-video: its text-to-video's transformer, whose blocks take no clip."""
    from diffusers import WanVideoToVideoPipeline

    WanVideoToVideoPipeline(
        tokenizer=tokenizer(512),
        text_encoder=t5("UMT5"),
        transformer=wan_transformer(seed=3),
        vae=wan_vae(),
        scheduler=multistep(),
    ).save_pretrained(path)
    return path


def flux_controlled(path: Path) -> Path:
    """Write FLUX with a control network."""
    from diffusers import FluxControlNetModel, FluxControlNetPipeline, FluxPipeline

    parts = FluxPipeline.from_pretrained(flux(path / "flux", num_stages=4)).components
    network = FluxControlNetModel(**{**_shared(parts["transformer"], FluxControlNetModel), "num_layers": 1})
    kept = {name: part for name, part in parts.items() if name not in ("image_encoder", "feature_extractor")}
    FluxControlNetPipeline(**kept, controlnet=shake(network, seed=5)).save_pretrained(path)
    return path


def sdxl_controlled(path: Path) -> Path:
    """Write Stable Diffusion XL with a control network, whose control picture is called ``image``."""
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline, StableDiffusionXLPipeline

    parts = StableDiffusionXLPipeline.from_pretrained(sdxl(path / "sdxl")).components
    network = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(4, 4, 8))
    StableDiffusionXLControlNetPipeline(**parts, controlnet=shake(network, seed=5)).save_pretrained(path)
    return path


def _shared(model: Any, other: type[Any]) -> dict[str, Any]:
    """Return the settings of ``model`` that ``other`` has as well."""
    names = inspect.signature(other.__init__).parameters
    return {name: value for name, value in model.config.items() if name in names}
