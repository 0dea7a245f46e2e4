"""The parts of kontext-shapes, untrained: those of flux-shapes, but for a transformer that is deeper and narrower."""

from diffusers import FluxTransformer2DModel

from training.flux_shapes.data import Tokenizers
from training.flux_shapes.model import POOLED_DIM, TEXT_DIM, FluxModel
from training.shapes.instructions import EDIT_ANSWERS
from training.shapes.reading import Reader
from training.shapes.tokens import byte_pairs, sentence_pieces

NUM_MERGES = 640  # instructions have more words than captions


def build_transformer() -> FluxTransformer2DModel:
    """Return a transformer of six blocks: it takes several to find a shape by its words and then to change it."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=5,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def build_model(tokenizers: Tokenizers) -> FluxModel:
    return FluxModel(*tokenizers, transformer=build_transformer(), reader=Reader(TEXT_DIM, 1, EDIT_ANSWERS))


def build_tokenizers(instructions: list[str]) -> Tokenizers:
    """Return CLIP's and T5's tokenizers, made from instructions."""
    return byte_pairs(instructions[:20_000], num_merges=NUM_MERGES), sentence_pieces(instructions[:50_000])
