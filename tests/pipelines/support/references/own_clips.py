"""Make the same clip by diffusers alone, in one process: the latents that go into the decoder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from diffusers.guiders import ClassifierFreeGuidance
from PIL import Image
from torch import Tensor

from pipelines.request import MediaRequest
from tests.pipelines.support.references.own_call import Change, as_it_is, own_state, silence
from tests.pipelines.support.references.video import Latents, named

Images = tuple[Image.Image, ...]


def blocks(folder: Path, request: MediaRequest, images: Images, change: Change = as_it_is) -> Latents:
    """Return latents of the modular pipeline."""
    named = {"image": images[0]} if images else {}
    return {"latents": own_state(folder, request, change=change, **named).get("latents")}


def timed_blocks(folder: Path, request: MediaRequest, images: Images, change: Change = as_it_is) -> Latents:
    """Return latents of the modular pipeline, called with the frame rate."""
    named = {"image": images[0]} if images else {}
    return {"latents": own_state(folder, request, change=change, frame_rate=request.fps, **named).get("latents")}


def sounding_blocks(
    folder: Path,
    request: MediaRequest,
    images: Images,
    change: Change = as_it_is,
    pipeline: Any = None,
    **inputs: Any,
) -> Latents:
    """Return the same with sound, and all passes of its own guiders, each with its scale. ``inputs`` are added.

    ``pipeline`` is LTX-2's of ``folder`` by default.
    """
    from diffusers import LTX2ModularPipeline

    pipeline = pipeline or LTX2ModularPipeline(pretrained_model_name_or_path=str(folder))
    pipeline.load_components(dtype=torch.float32)
    change(pipeline)
    pipeline.guider.guidance_scale = request.true_cfg_scale
    if request.true_cfg_scale <= 1:
        pipeline.guider.disable()
        pipeline.audio_guider.disable()
    for block in pipeline.blocks.sub_blocks.values():
        silence(block)
    state = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        frame_rate=request.fps,
        num_inference_steps=request.num_inference_steps,
        # Prompts are padded to it, and a tiny tokenizer has fewer tokens.
        max_sequence_length=pipeline.tokenizer.model_max_length,
        sigmas=list(request.solver.sigmas) or None,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pt",
        **({"image": images[0]} if images else {}),
        **inputs,
    )
    return {name: state.get(name) for name in ("latents", "audio_latents", "videos", "audio")}


def hunyuan_blocks(folder: Path, request: MediaRequest, images: Images, change: Change = as_it_is) -> Latents:
    """Return latents of the modular pipeline."""
    from diffusers import HunyuanVideo15ModularPipeline

    pipeline = HunyuanVideo15ModularPipeline(pretrained_model_name_or_path=str(folder))
    pipeline.load_components(dtype=torch.float32)
    change(pipeline)
    guider = ClassifierFreeGuidance(guidance_scale=request.true_cfg_scale, enabled=request.true_cfg_scale > 1)
    pipeline.update_components(guider=guider)
    for block in pipeline.blocks.sub_blocks.values():
        silence(block)
    if images:
        _show(pipeline, images[0])
    state = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pt",
        sigmas=list(request.solver.sigmas) or None,
        **({"image": images[0]} if images else {}),
    )
    return {name: state.get(name) for name in ("latents", "videos")}


def hunyuan_pipeline(folder: Path, request: MediaRequest, images: Images) -> Latents:
    """Return latents of the classic pipeline without guidance, with which the blocks fail."""
    import diffusers

    pipeline = _classic(diffusers.HunyuanVideo15Pipeline, folder)
    pipeline.guider = ClassifierFreeGuidance(enabled=False)
    latents: Any = pipeline(
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).frames
    return {"latents": latents}


def _show(pipeline: Any, image: Image.Image) -> None:
    """Replace the zeros that the blocks use by the encoder's output for the picture."""
    shown = pipeline.feature_extractor.preprocess(images=image, do_resize=True, return_tensors="pt")
    with torch.no_grad():
        seen = pipeline.image_encoder(**shown).last_hidden_state
    forward = pipeline.transformer.forward
    pipeline.transformer.forward = lambda **call: forward(**{**call, "image_embeds": seen})


def ltx_pipeline(folder: Path, request: MediaRequest, images: Images) -> Latents:
    """Return the classic pipeline's latents in the decoder's form: the blocks fail without a negative prompt."""
    import diffusers

    latents_BLC: Any = _classic(diffusers.LTXPipeline, folder)(
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        frame_rate=request.fps,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).frames
    side = 32
    latents_BFHWC = latents_BLC.unflatten(1, (-1, request.height // side, request.width // side))
    return {"latents": latents_BFHWC.movedim(-1, 1)}


def ltx2_tokens(pipeline: Any, folder: Path, request: MediaRequest, **conditions: Any) -> Tensor:
    """Return the clip's latents as tokens, from a classic pipeline of LTX-2's class ``pipeline``, without guidance."""
    import diffusers

    parts = diffusers.LTX2Pipeline.from_pretrained(folder).components
    parts["tokenizer"].padding_side = "left"  # Gemma's side
    taken = inspect.signature(pipeline.__init__).parameters
    classic = pipeline(**{part: model for part, model in parts.items() if part in taken})
    classic.set_progress_bar_config(disable=True)
    latents, _ = classic(
        **conditions,
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        frame_rate=request.fps,
        num_inference_steps=request.num_inference_steps,
        **{f"{kind}{scale}": 1.0 for kind in ("", "audio_") for scale in ("guidance_scale", "modality_scale")},
        **{f"{kind}{scale}": 0.0 for kind in ("", "audio_") for scale in ("stg_scale", "guidance_rescale")},
        max_sequence_length=classic.tokenizer.model_max_length,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
        return_dict=False,
    )
    tokens: Tensor = latents.flatten(2).mT
    return tokens


def wan_pipeline(folder: Path, request: MediaRequest, images: Images) -> Latents:
    """Return the classic pipeline's latents: the blocks swap width and height of the last frame, and lack per-token
    timesteps."""
    import diffusers

    latents: Any = _classic(diffusers.WanImageToVideoPipeline, folder)(
        **dict(zip(("image", "last_image"), images, strict=False)),
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).frames
    return {"latents": latents}


def vace_pipeline(
    folder: Path, request: MediaRequest, images: Images, change: Change = as_it_is, **call: Any
) -> Latents:
    """Return Wan VACE's result for a clip and ``call``, without the latent frames of reference pictures."""
    from diffusers import WanVACEPipeline

    pipeline = _classic(WanVACEPipeline, folder)
    change(pipeline)
    frames = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        video=list(images) or None,
        **{"output_type": "latent", **call},
    ).frames
    return {"latents": frames[:, :, request.num_pictures :] if isinstance(frames, Tensor) else frames}


def _classic(pipeline: Any, folder: Path) -> Any:
    classic = pipeline.from_pretrained(folder, dtype=torch.float32)
    classic.set_progress_bar_config(disable=True)
    return classic


def guided_blocks(folder: Path, request: MediaRequest, images: Images, change: Change = as_it_is) -> Latents:
    """Return the result of a modular pipeline that guides itself, with sound if folder and request have it."""
    sounds = (folder / "sound_tokenizer").is_dir() and request.num_frames > 1 and request.sound is not False
    state = own_state(
        folder,
        request,
        change=change,
        guidance_scale=request.true_cfg_scale,
        fps=request.fps,
        enable_sound=sounds,
        **named(images),
    )
    names = ("latents", "sound_latents", "videos", "sound")
    return {name: value for name in names if (value := state.get(name)) is not None}
