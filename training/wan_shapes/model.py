"""The parts of wan-shapes, untrained, in the shapes that ship."""

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, UMT5Config, UMT5EncoderModel

from training.flux_shapes.model import TEXT_DIM, additive, t5_config
from training.shapes.reading import MOTION_ANSWERS, Reader

NUM_FRAMES, SIDE_PX, FPS = 17, 96, 16
FLOW_SHIFT = 3.0


def build_vae() -> AutoencoderKLWan:
    """Return a causal auto-encoder: 8x down in space, 4x in time, 16 channels."""
    return AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 2, 2, 3], num_res_blocks=1)


def build_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=32,
        text_dim=TEXT_DIM,
        freq_dim=128,
        ffn_dim=640,
        num_layers=4,
        rope_max_seq_len=128,
    )


def build_umt5(tokenizer: PreTrainedTokenizerBase) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**t5_config(tokenizer)))


def build_scheduler() -> UniPCMultistepScheduler:
    """Return a scheduler with Wan 2.1's own settings at its small size."""
    return UniPCMultistepScheduler(
        num_train_timesteps=1000,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=FLOW_SHIFT,
        solver_order=2,
        solver_type="bh2",
        lower_order_final=True,
        disable_corrector=[],
        final_sigmas_type="zero",
    )


class WanModel(nn.Module):
    """Text encoder and transformer, trained together."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.pad_id: int = tokenizer.pad_token_id
        self.umt5 = build_umt5(tokenizer)
        self.transformer = build_transformer()
        self.reader = Reader(TEXT_DIM, 1, MOTION_ANSWERS)

    def text(self, ids_BL: Tensor, num_tokens: int = 0) -> Tensor:
        """Return the sequence (B, L, D) in float32, L at least `num_tokens`. Padding is not attended to, and its
        places are zero, as in Wan's pipeline."""
        ids = ids_BL.long()
        padding = ids == self.pad_id
        with torch.autocast(ids.device.type, torch.bfloat16):
            sequence: Tensor = self.umt5(ids, additive(padding[:, None, None])).last_hidden_state
        length = max(num_tokens, ids.shape[1])
        return functional.pad(sequence.float() * ~padding[..., None], (0, 0, 0, length - ids.shape[1]))

    def velocity(self, latents_BCFHW: Tensor, sigma_B: Tensor, sequence: Tensor) -> Tensor:
        """Return the predicted velocity, shaped like the latents."""
        prediction: Tensor = self.transformer(
            hidden_states=latents_BCFHW, timestep=sigma_B * 1000, encoder_hidden_states=sequence, return_dict=False
        )[0]
        return prediction
