"""vLLM-Omni's transformers of the models that published.py times, called as its pipelines call them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.published import PublishedModel
from benchmarks.peers import vllm_omni
from benchmarks.peers.calls import Call, ClipOfText, Prepare, known, modulation_sizes, packed_clip, packed_time
from engines.core.spec import ParallelSpec

GROUPS = "vllm_omni.diffusion.distributed.parallel_state"
"""Module of its groups of ranks."""
FLUX = "FluxTransformer2DModel"
COSMOS_ARGUMENTS = ("sound_gen", "sound_dim", "sound_latent_fps")
"""Arguments of its transformer of Cosmos 3, which it does not look up in its configuration."""


def transformer_of(
    model: PublishedModel, maker: str, layout: ParallelSpec, precision: str = "native"
) -> tuple[Any, Prepare]:
    """Return the transformer, with compiled blocks as it ships or eager, and what prepares a call.

    ``precision`` "fp8" is its ``--quantization fp8``. Its weights are copies of those of ``model``, whose module may be
    on the CPU from now on.
    """
    module, name = model.module, type(model.module).__name__
    place, prepare = known(MODELS, name)
    if name.startswith("Flux2") and module.config.guidance_embeds:
        place = "flux2.flux2_transformer"  # klein has a file of its own
    od_config = vllm_omni.begin(module.dtype, precision, layout)
    config = {key: value for key, value in module.config.items() if not key.startswith("_")}
    config |= modulation_sizes(config) if name.startswith("MiniMax") else {}
    _configure(od_config, config)
    if name.startswith("Cosmos3"):
        transformer_class = _cosmos_class()
        options = {"od_config": od_config, **{name: config[name] for name in COSMOS_ARGUMENTS}}
    else:
        place, _, own_name = place.partition(":")
        transformer_class = getattr(importlib.import_module(f"vllm_omni.diffusion.models.{place}"), own_name or name)
        settings = config if name == FLUX else {**config, "od_config": od_config, "diffusers_weights": True}
        options = {key: settings[key] for key in inspect.signature(transformer_class).parameters if key in settings}
    transformer = vllm_omni.loaded(transformer_class, options, module, od_config)
    if layout.context > 1 and name == FLUX:
        vllm_omni.cut_sequence(transformer, _plan_of_flux(), layout)
    elif layout.context > 1:
        _cut_by_its_plan(transformer, layout)
    if "eager" not in maker:
        vllm_omni.compile_blocks(transformer, od_config)
    return transformer, prepare


def _plan_of_flux() -> dict[str, Any]:
    """Return diffusers' plan for FLUX.1: divide text and picture among the ranks, gather the prediction.

    No release up to 0.30 declares how its sequence is cut: it has tensor parallelism for this model. So the plan is
    ours; hooks, attention, exchange and compilation are vLLM-Omni's.
    """
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelInput, SequenceParallelOutput

    dims = {"hidden_states": (1, 3), "encoder_hidden_states": (1, 3), "img_ids": (0, 2), "txt_ids": (0, 2)}
    cuts = {name: SequenceParallelInput(split_dim=dim, expected_dims=rank) for name, (dim, rank) in dims.items()}
    return {"": cuts, "proj_out": SequenceParallelOutput(gather_dim=1, expected_dims=3)}


def _cut_by_its_plan(transformer: Any, layout: ParallelSpec) -> None:
    """Divide the transformer by its plan. Modules outside the plan are whole on each rank.

    Each forward begins as the first of a request. Hooks of Wan's plan count two divisions and one gather, so the count
    grows with the forwards, and blocks that were compiled for a count are compiled again, or run eagerly.
    """
    from vllm_omni.diffusion.forward_context import get_forward_context

    vllm_omni.cut_sequence(transformer, transformer._sp_plan, layout)
    context = get_forward_context()
    context.sp_plan_hooks_applied = True

    def begin(*_: Any) -> None:
        context._sp_shard_depth = 0
        context._sp_equal_pad_stack.clear()

    transformer.register_forward_pre_hook(begin)


def _cosmos_class() -> Any:
    """Return a class that is made and loaded like other models': its pipeline names this one's weights."""
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm_omni.diffusion.models.cosmos3.pipeline_cosmos3 import Cosmos3OmniDiffusersPipeline
    from vllm_omni.diffusion.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer

    class Transformer(Cosmos3VFMTransformer):
        def __init__(self, od_config: Any, quant_config: Any, **options: Any) -> None:
            assert quant_config is None, "it looks its quantization up in od_config"
            super().__init__(od_config, **options)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            renamed = ((Cosmos3OmniDiffusersPipeline.remap_checkpoint_key(name), x) for name, x in weights)
            kept = ((name.removeprefix("transformer."), x) for name, x in renamed if name)
            found: set[str] = AutoWeightsLoader(self).load_weights(kept)
            self.post_load_weights()
            return found

    return Transformer


def _configure(od_config: Any, config: Mapping[str, Any]) -> None:
    """Put the transformer's configuration into its own, where some transformers look up what are no arguments."""
    from vllm_omni.diffusion.data import TransformerConfig

    rotary = {"rope_scaling": {"mrope_section": list(config["rope_axes_dim"])}} if "rope_axes_dim" in config else {}
    od_config.tf_model_config = TransformerConfig(params={**config, **rotary})


def _as_they_are(transformer: Any, own: Mapping[str, Any]) -> Call:
    return lambda: transformer(**own, return_dict=False)[0]


def _qwen(transformer: Any, own: Mapping[str, Any]) -> Call:
    lengths = [own["encoder_hidden_states"].shape[1]]
    return lambda: transformer(**own, txt_seq_lens=lengths).sample


def _z_image(transformer: Any, own: Mapping[str, Any]) -> Call:
    return lambda: transformer(own["x"], own["t"], own["cap_feats"])[0]


def _cosmos(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call. The transformer caches one branch's text, so branches take turns, as in its pipeline."""
    clip, text = ClipOfText.of(own), transformer.language_model
    rotaries = (text.rotary_emb(clip.latents, ids) for ids in (clip.text_positions, clip.positions))
    of_text, of_clip = (tuple(x_BLD.unsqueeze(2) for x_BLD in rotary) for rotary in rotaries)
    with torch.inference_mode():
        kept = text(clip.text_ids, of_text)
    shape, mask = tuple(clip.latents.shape[2:]), torch.ones_like(clip.text_ids)

    def call() -> Any:
        transformer.cached_kv, transformer.cached_freqs_gen = kept, of_clip
        return transformer(clip.latents, clip.timestep, clip.text_ids, mask, shape, sound_latents=clip.sound)

    return call


def _ltx2(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call with a timestep for each token and without masks, as its pipeline makes it."""
    tokens = {"timestep": own["hidden_states"].shape[1], "audio_timestep": own["audio_hidden_states"].shape[1]}
    times = {name: own[name].unsqueeze(1).expand(-1, count) for name, count in tokens.items()}
    times |= {"sigma": own["timestep"], "audio_sigma": own["audio_timestep"]}
    masks = dict.fromkeys(("encoder_attention_mask", "audio_encoder_attention_mask"))
    return lambda: transformer(**{**own, **times, **masks}, return_dict=False)


def _minimax(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call. Values that its pipeline computes at each step from unchanged positions are computed once."""
    loop = importlib.import_module("vllm_omni.diffusion.models.minimax_h3.denoise_loop")
    branch = loop.MiniMaxH3DenoiseBranch(**packed_clip(own), device=own["hidden_states"].device)
    times = dict.fromkeys(("t_video", "t_audio", "imgvid_cond_timestep", "audio_ref_cond_timestep"), packed_time(own))
    rows = {"video_rows": own["hidden_states"][0], "audio_rows": own["audio_hidden_states"][0]}
    arguments = branch.forward_kwargs(**rows, **times)
    return lambda: transformer(**arguments)


MODELS: dict[str, tuple[str, Prepare]] = {
    FLUX: ("flux.flux_transformer", _as_they_are),
    "Flux2Transformer2DModel": ("flux2_klein.flux2_klein_transformer", _as_they_are),
    "QwenImageTransformer2DModel": ("qwen_image.qwen_image_transformer", _qwen),
    "ZImageTransformer2DModel": ("z_image.z_image_transformer", _z_image),
    "WanTransformer3DModel": ("wan2_2.wan2_2_transformer", _as_they_are),
    "Cosmos3OmniTransformer": ("cosmos3.transformer_cosmos3", _cosmos),
    "LTX2VideoTransformer3DModel": ("ltx2.ltx2_transformer", _ltx2),
    "MiniMaxH3Transformer3DModel": ("minimax_h3.minimax_h3_transformer:MiniMaxH3DiTModel", _minimax),
    "HunyuanVideo15Transformer3DModel": ("hunyuan_video.hunyuan_video_15_transformer", _as_they_are),
}
"""Place of the transformer (with its name, where it has its own) and what prepares a call, by diffusers' class."""
