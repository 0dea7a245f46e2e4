"""The parts of flux-shapes, untrained, in the shapes that ship."""

import math
from functools import cache

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from training.latents import pack
from training.shapes.reading import STILL_ANSWERS, Reader
from training.shapes.scenes import PLACES
from training.shapes.tokens import MAX_LENGTH

TEXT_DIM, POOLED_DIM = 128, 64
REFERENCE = 1  # first coordinate of the positions of the picture that is edited
TEXT_ATTENTION = "eager"  # 48 tokens need no kernel, and T5's position bias needs a gradient


def build_vae() -> AutoencoderKL:
    """Return an auto-encoder: 8x down, 16 channels, and no attention, so that every size decodes alike."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=16,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        sample_size=128,
        force_upcast=False,
    )


def build_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=8,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def build_clip(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=POOLED_DIM,
        intermediate_size=4 * POOLED_DIM,
        projection_dim=POOLED_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=TEXT_ATTENTION,
    )
    return CLIPTextModel(config)


def t5_config(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the options that the T5 and the UMT5 encoder have in common."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_DIM,
        "d_kv": 32,
        "num_heads": 4,
        "d_ff": 2 * TEXT_DIM,
        "num_layers": 3,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": MAX_LENGTH,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "attn_implementation": TEXT_ATTENTION,
    }


def build_t5(tokenizer: PreTrainedTokenizerBase) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**t5_config(tokenizer)))


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return a scheduler with FLUX.1-dev's own settings."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def shift_of(num_image_tokens: int) -> float:
    """Return the factor by which FLUX's scheduler moves its noise levels for a picture of so many tokens."""
    return math.exp(calculate_shift(num_image_tokens))


def image_ids(height: int, width: int, picture: int = 0) -> Tensor:
    """Return positions ``ids_S3`` (picture, row, column) of the tokens of a latent, which are 2 x 2; float32."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack((torch.full_like(rows, picture), rows, columns), dim=-1).reshape(-1, 3).float()


@cache
def _positions(height: int, width: int, device: torch.device, picture: int = 0) -> Tensor:
    """Return `image_ids`, kept on the device: a copy to it cannot be part of a CUDA graph."""
    return image_ids(height, width, picture).to(device)


def additive(hidden: Tensor) -> Tensor:
    """Return the numbers that attention adds to the scores of hidden places. The encoders' own masks copy a number to
    the device each time, which no CUDA graph may do."""
    return hidden.float() * torch.finfo(torch.float32).min


class FluxModel(nn.Module):
    """Text encoders and transformer, trained together."""

    def __init__(
        self,
        clip_tokenizer: PreTrainedTokenizerBase,
        t5_tokenizer: PreTrainedTokenizerBase,
        *,
        transformer: FluxTransformer2DModel | None = None,
        reader: Reader | None = None,
    ) -> None:
        super().__init__()
        self.clip, self.t5 = build_clip(clip_tokenizer), build_t5(t5_tokenizer)
        self.transformer = transformer or build_transformer()
        self.reader = reader or Reader(TEXT_DIM, len(PLACES), STILL_ANSWERS)

    @property
    def clip_layers(self) -> nn.ModuleList:
        """Return the CLIP encoder's blocks, wherever this version of transformers keeps them."""
        encoder = getattr(self.clip, "text_model", self.clip).encoder
        layers: nn.ModuleList = encoder.layers
        return layers

    def text(self, clip_ids_BL: Tensor, t5_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return pooled (B, D) and sequence (B, L, D) in float32. Padding is attended to, as in FLUX's pipeline. The
        two tokenizers may pad to different lengths."""
        length, device = clip_ids_BL.shape[1], clip_ids_BL.device
        every = torch.zeros(1, 1, 1, t5_ids_BL.shape[1], device=device)
        later = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        with torch.autocast(device.type, torch.bfloat16):
            pooled = self.clip(clip_ids_BL.long(), additive(later)).pooler_output
            sequence = self.t5(t5_ids_BL.long(), every)[0]
        return pooled.float(), sequence.float()

    def velocity(
        self,
        latents_BCHW: Tensor,
        sigma_B: Tensor,
        guidance_B: Tensor,
        text: tuple[Tensor, Tensor],
        reference_BCHW: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted velocity, packed (B, S, 4 C). An editor sees a reference of that size besides."""
        pooled, sequence = text
        height, width = latents_BCHW.shape[-2:]
        tokens = pack(latents_BCHW)
        positions = _positions(height, width, latents_BCHW.device)
        num_tokens = tokens.shape[1]
        if reference_BCHW is not None:
            tokens = torch.cat([tokens, pack(reference_BCHW)], dim=1)
            positions = torch.cat([positions, _positions(height, width, latents_BCHW.device, REFERENCE)])
        prediction: Tensor = self.transformer(
            hidden_states=tokens,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=sigma_B,
            guidance=guidance_B,
            img_ids=positions,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=latents_BCHW.device),
            return_dict=False,
        )[0]
        return prediction[:, :num_tokens]
