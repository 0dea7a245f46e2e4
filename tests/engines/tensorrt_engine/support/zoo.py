"""Small FLUX and Wan transformers with weights large enough that attention and modulation matter.

Fresh default weights hide faults: omitting a whole exchange would change the prediction by one percent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from engines.core.model import Branch, DenoiserModel
from engines.parallel.local_attention import plain_attention
from tests.support import flux_denoiser as flux
from tests.support import wan_denoiser as wan
from tests.support.flux_denoiser import image_ids

NUM_HEADS = 8
Buckets = tuple[dict[str, Tensor], dict[str, Tensor]]


def shaken(module: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)

    def randn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, weight in module.named_parameters():
            is_norm = "norm" in name and name.endswith("weight") and weight.ndim == 1
            scale = 1.2 / weight[0].numel() ** 0.5 if weight.ndim > 1 else 0.1
            weight.copy_(1 + 0.2 * randn(weight.shape) if is_norm else scale * randn(weight.shape))
            if any(part in name for part in ("norm_q", "norm_k", "norm_added")):
                weight.mul_(2)
    return module.eval()


def flux_model() -> DenoiserModel:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=24,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 10, 10),
    )
    return flux.as_denoiser(shaken(transformer))


def flux_inputs(batch: int, height: int, width: int, num_text: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, height * width // 4, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, num_text, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 16, generator=generator),
        "timestep": torch.full((batch,), 0.7),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": image_ids(height, width),
        "txt_ids": torch.zeros(num_text, 3),
    }


def wan_model() -> DenoiserModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=NUM_HEADS,
        attention_head_dim=24,
        in_channels=8,
        out_channels=8,
        text_dim=32,
        freq_dim=32,
        ffn_dim=256,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )
    return wan.as_denoiser({"transformer": shaken(transformer)})


def wan_inputs(batch: int, frames: int, height: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 8, frames, height, width, generator=generator),
        "timestep": torch.full((batch,), 700.0),
        "encoder_hidden_states": torch.randn(batch, 22, 32, generator=generator),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """A model, the inputs most tests use (with padding on 2 and 4 ranks), and two buckets for dynamic shapes."""

    model: Callable[[], DenoiserModel]
    inputs: Callable[[], dict[str, Tensor]]
    buckets: Callable[[], Buckets]
    float32_inputs: tuple[str, ...]


SPECIMENS = {
    "flux": Specimen(
        model=flux_model,
        inputs=lambda: flux_inputs(1, 10, 14, 23),  # 35 + 23 tokens
        buckets=lambda: (flux_inputs(2, 12, 16, 24), flux_inputs(1, 16, 8, 32)),
        float32_inputs=("timestep", "guidance", "img_ids", "txt_ids"),
    ),
    "wan": Specimen(
        model=wan_model,
        inputs=lambda: wan_inputs(1, 3, 6, 10),  # 45 tokens
        buckets=lambda: (wan_inputs(2, 3, 8, 16), wan_inputs(1, 5, 4, 8)),
        float32_inputs=("timestep",),
    ),
}


def reference(model: DenoiserModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the prediction of the unsharded model in float32 with attention written out."""
    (module,) = model.modules.values()
    model.set_kernel(module, plain_attention)
    with torch.no_grad():
        return model.forward(module, inputs)


def cast(specimen: Specimen, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x if name in specimen.float32_inputs else x.to(dtype) for name, x in inputs.items()}


def transformer_branch(inputs: dict[str, Tensor]) -> Branch:
    return Branch(inputs=inputs)
