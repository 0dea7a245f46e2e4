"""Folders of published models at full size, in diffusers' layout, with random weights."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.making import default_dtype
from pipelines.blocks.footprint import encoder_config
from pipelines.directory import read_config, read_index
from pipelines.loading import resolve_configuration

SEED = 1
VISION_START = "<|vision_start|>"
"""Cosmos 3 ends prompts with it."""
DECODING_PARTS = {"vae", "audio_vae", "vocoder"}
CLIP_LENGTH, USUAL_LENGTH = 77, 512
"""Tokens of a prompt, the last of them among these."""
CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


def write_folder(name: str, folder: Path, device: torch.device, *, twins: bool = False) -> None:
    """Write the published model ``name``, made on ``device`` in bfloat16. ValueError for those that are not known.

    Its tokenizers know letters alone: how long a prompt is, in tokens, is not what the published ones make of it. With
    ``twins``, parts with the same class and configuration are one on the disk: the later ones link to the first.
    """
    if name not in ENCODERS:
        raise ValueError(f"no text encoders are known for {name}; known: {', '.join(ENCODERS)}")
    published = resolve_configuration(name)
    shutil.copytree(published, folder)
    with torch.device(device), default_dtype(torch.bfloat16):
        torch.manual_seed(SEED)
        first = first_twins(published)
        for part in read_index(published):
            if twins and first.get(part, part) != part:
                _link(folder / part, first[part])
            elif part in first:
                _save(diffusers_model(published, part), folder / part)
        for part, make in ENCODERS[name].items():
            _save(make(), folder / part)
    index = json.loads((folder / "model_index.json").read_text())
    plain = {part: ["transformers", "PreTrainedTokenizerFast"] for part in index if _is_tokenizer(published, part)}
    for part in plain:
        letters(LENGTHS.get(name, {}).get(part, USUAL_LENGTH)).save_pretrained(folder / part)
    (folder / "model_index.json").write_text(json.dumps(index | plain | UNGUARDED.get(name, {}), indent=1))


def first_twins(published: Path) -> dict[str, str]:
    """Return, for each part of diffusers with weights, the first part with the same class and configuration."""
    index, first = read_index(published), dict[str, str]()
    kinds = dict[str, str]()
    for part in index:
        if (published / part / "config.json").is_file():
            kind = json.dumps([index[part], read_config(published, part)], sort_keys=True)
            first[part] = kinds.setdefault(kind, part)
    return first


def _link(folder: Path, other: str) -> None:
    """Replace ``folder`` by a link to the folder ``other`` beside it."""
    shutil.rmtree(folder)
    folder.symlink_to(other)


def write_vae(name: str, folder: Path, device: torch.device) -> None:
    """Write the files that a decoder reads of the published model ``name``: configurations and an auto-encoder.

    The auto-encoder is made on ``device`` in bfloat16.
    """
    published = resolve_configuration(name)
    shutil.copytree(published, folder)
    with torch.device(device), default_dtype(torch.bfloat16):
        torch.manual_seed(SEED)
        for part in DECODING_PARTS & read_index(published).keys():
            _save(diffusers_model(published, part), folder / part)


def letters(max_length: int = USUAL_LENGTH) -> Any:
    """Return a tokenizer with one token for each letter, for prompts of at most ``max_length``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", *string.printable, "<eos>", VISION_START]
    tokens = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(known)}, unk_token=" "))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokens.post_processor = processors.TemplateProcessing(
        single=["$A", "<eos>"], special_tokens=[("<eos>", known.index("<eos>"))]
    )
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": " "}
    special["additional_special_tokens"] = [VISION_START]
    return PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=CHAT, model_max_length=max_length, **special)


def _is_tokenizer(published: Path, part: str) -> bool:
    """Return whether a part reads prompts, alone or inside a processor. Tokenizers of sound are models of diffusers."""
    entry = read_index(published)[part]
    if not isinstance(entry, list) or entry[0] != "transformers":
        return False
    return "Tokenizer" in entry[1] or (part == "tokenizer" and "Processor" in entry[1])


def diffusers_model(published: Path, part: str) -> Any:
    """Return a part with random weights, by the configuration of the folder ``published``."""
    library, class_name = read_index(published)[part]
    module = "diffusers" if library == "diffusers" else f"diffusers.pipelines.{library}"
    model = getattr(import_module(module), class_name).from_config(dict(read_config(published, part)))
    if "latents_mean" in model.config and model.config.latents_mean is None:  # a checkpoint has its own
        num = model.config.latent_channels
        model.register_to_config(latents_mean=[0.0] * num, latents_std=[1.0] * num)
    return model


def _save(model: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A text encoder of transformers: its class, and its configuration by sizes or as ``published`` by a model."""

    kind: str
    config: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""

    def __call__(self) -> Any:
        transformers = import_module("transformers")
        kind = getattr(transformers, self.kind)
        if not self.published:
            return kind(getattr(transformers, self.config)(**self.sizes))
        config = encoder_config(resolve_configuration(self.published), "text_encoder")
        assert config is not None
        return kind(kind.config_class(**config))


def _sizes(names: str, *values: int, **others: Any) -> dict[str, Any]:
    return {**dict(zip(names.split(), values, strict=True)), **others}


BERT_NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
T5_NAMES = "d_model d_kv d_ff num_layers num_heads vocab_size"
OF_CLIP = {"max_position_embeddings": CLIP_LENGTH, "eos_token_id": 101}
VIT_L = _sizes(BERT_NAMES, 768, 3072, 12, 12, projection_dim=768, **OF_CLIP)
BIG_G = _sizes(BERT_NAMES, 1280, 5120, 32, 20, projection_dim=1280, hidden_act="gelu", **OF_CLIP)
GATED = {"feed_forward_proj": "gated-gelu"}
QWEN3_4B = _sizes(BERT_NAMES, 2560, 9728, 36, 32, num_key_value_heads=8, head_dim=128, vocab_size=151936)
QWEN25_7B = _sizes(BERT_NAMES, 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064)
ROTARY = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}}

CLIP = Encoder("CLIPTextModel", "CLIPTextConfig", VIT_L)
CLIP_WITH_PROJECTION = Encoder("CLIPTextModelWithProjection", "CLIPTextConfig", VIT_L)
CLIP_LARGE = Encoder("CLIPTextModelWithProjection", "CLIPTextConfig", BIG_G)
T5_XXL = Encoder("T5EncoderModel", "T5Config", _sizes(T5_NAMES, 4096, 64, 10240, 24, 64, 32128, **GATED))
UMT5_XXL = Encoder("UMT5EncoderModel", "UMT5Config", _sizes(T5_NAMES, 4096, 64, 10240, 24, 64, 256384, **GATED))
GLYPH_BYT5 = Encoder("T5EncoderModel", "T5Config", _sizes(T5_NAMES, 1472, 64, 3584, 12, 6, 1510, **GATED))
QWEN25 = Encoder("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", QWEN25_7B | ROTARY)

Encoders = Mapping[str, Callable[[], Any]]
WAN: Encoders = {"text_encoder": UMT5_XXL}
FLUX: Encoders = {"text_encoder": CLIP, "text_encoder_2": T5_XXL}
HUNYUAN: Encoders = {"text_encoder": QWEN25, "text_encoder_2": GLYPH_BYT5}
SD3: Encoders = {"text_encoder": CLIP_WITH_PROJECTION, "text_encoder_2": CLIP_LARGE, "text_encoder_3": T5_XXL}
QWEN: Encoders = {"text_encoder": Encoder("Qwen2_5_VLForConditionalGeneration", published="Qwen-Image")}
Z_IMAGE: Encoders = {"text_encoder": Encoder("Qwen3Model", "Qwen3Config", QWEN3_4B)}
KREA: Encoders = {"text_encoder": Encoder("Qwen3VLModel", published="Krea-2-Raw")}
TWO_CLIPS = ("stable-diffusion-3-medium", "stable-diffusion-3.5-large", "stable-diffusion-3.5-medium")

ENCODERS: Mapping[str, Encoders] = {
    "Cosmos3-Nano": {},
    "Cosmos3-Super": {},
    **dict.fromkeys(("FLUX.1-Kontext-dev", "FLUX.1-dev", "FLUX.1-schnell"), FLUX),
    "ERNIE-Image": {"text_encoder": Encoder("Mistral3Model", published="ERNIE-Image")},
    "FLUX.2-dev": {"text_encoder": Encoder("Mistral3ForConditionalGeneration", published="FLUX.2-dev")},
    "FLUX.2-klein-4B": {"text_encoder": Encoder("Qwen3ForCausalLM", "Qwen3Config", QWEN3_4B)},
    "FLUX.2-klein-9B": {"text_encoder": Encoder("Qwen3ForCausalLM", published="FLUX.2-klein-9B")},
    "Helios-Base": WAN,
    **dict.fromkeys(("HunyuanVideo-1.5-480p_t2v", "HunyuanVideo-1.5-720p_t2v"), HUNYUAN),
    **dict.fromkeys(("Krea-2-Raw", "Krea-2-Turbo"), KREA),
    "LTX-Video": {"text_encoder": T5_XXL},
    **dict.fromkeys(("Qwen-Image", "Qwen-Image-2512"), QWEN),
    **dict.fromkeys(
        (
            "Wan2.1-T2V-1.3B",
            "Wan2.1-T2V-14B",
            "Wan2.1-VACE-14B",
            "Wan2.2-I2V-A14B",
            "Wan2.2-T2V-A14B",
            "Wan2.2-TI2V-5B",
        ),
        WAN,
    ),
    **dict.fromkeys(("Z-Image", "Z-Image-Turbo"), Z_IMAGE),
    **dict.fromkeys(TWO_CLIPS, SD3),
    "ideogram-4": {"text_encoder": Encoder("Qwen3VLModel", published="ideogram-4")},
    "stable-diffusion-xl-base-1.0": {"text_encoder": CLIP, "text_encoder_2": CLIP_LARGE},
}
"""Text encoders by model and part."""
LENGTHS: Mapping[str, Mapping[str, int]] = {
    **{name: {"tokenizer": CLIP_LENGTH} for name in ("FLUX.1-Kontext-dev", "FLUX.1-dev", "FLUX.1-schnell")},
    **{
        name: {"tokenizer": CLIP_LENGTH, "tokenizer_2": CLIP_LENGTH}
        for name in (*TWO_CLIPS, "stable-diffusion-xl-base-1.0")
    },
}
"""Length at which tokenizers cut prompts, by model and part, where it is not the usual one."""
UNGUARDED: Mapping[str, Mapping[str, Any]] = {
    name: {"enable_safety_checker": False} for name in ("Cosmos3-Nano", "Cosmos3-Super")
}
"""Settings of the pipeline. A guardrail is off: its verdict about noise means nothing."""
