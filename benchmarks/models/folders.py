"""Folders of published models at full size, in diffusers' layout, with random weights."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
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
    """Writes what a decoder reads of the published model ``name``: configurations, and an auto-encoder made on
    ``device`` in bfloat16."""
    published = resolve_configuration(name)
    shutil.copytree(published, folder)
    with torch.device(device), default_dtype(torch.bfloat16):
        torch.manual_seed(SEED)
        for part in DECODING_PARTS & read_index(published).keys():
            _save(diffusers_model(published, part), folder / part)


def letters(max_length: int = USUAL_LENGTH) -> Any:
    """A tokenizer with one token for each letter, for prompts of at most ``max_length``."""
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
    """A part with random weights, by the configuration of the folder ``published``."""
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


def _qwen3(kind: str) -> Any:
    """Qwen3-4B, as in its published ``config.json``."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    return getattr(transformers, kind)(config)


def _clip() -> Any:
    """The text part of CLIP ViT-L/14."""
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes["projection_dim"] = 768
    return CLIPTextModel(CLIPTextConfig(**sizes, max_position_embeddings=CLIP_LENGTH, eos_token_id=101))


def _t5() -> Any:
    """The encoder of T5 v1.1 XXL."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return T5EncoderModel(T5Config(**sizes, vocab_size=32128, feed_forward_proj="gated-gelu"))


def _umt5() -> Any:
    """The encoder of UMT5 XXL."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return UMT5EncoderModel(UMT5Config(**sizes, vocab_size=256384, feed_forward_proj="gated-gelu"))


def _clip_with_projection() -> Any:
    """The text part of CLIP ViT-L/14, and what follows it."""
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(_clip().config)


def _clip_large() -> Any:
    """The text part of OpenCLIP ViT-bigG/14, and what follows it."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    more = {"projection_dim": 1280, "hidden_act": "gelu", "max_position_embeddings": CLIP_LENGTH}
    return CLIPTextModelWithProjection(CLIPTextConfig(**sizes, **more, eos_token_id=101))


def _byt5() -> Any:
    """The encoder of Glyph-ByT5, small."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6}
    return T5EncoderModel(T5Config(**sizes, vocab_size=1510, feed_forward_proj="gated-gelu"))


def _qwen25() -> Any:
    """The text part of Qwen2.5-VL-7B."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    rotary = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**sizes, **heads, rope_parameters=rotary))


def _published_encoder(model: str, kind: str) -> Any:
    """Return the ``text_encoder`` of ``model``, of the class ``kind``, as its published configuration says."""
    import transformers

    config = encoder_config(resolve_configuration(model), "text_encoder")
    assert config is not None
    made = getattr(transformers, kind)
    return made(made.config_class(**config))


Encoders = Mapping[str, Callable[[], Any]]

WAN: Encoders = {"text_encoder": _umt5}
FLUX: Encoders = {"text_encoder": _clip, "text_encoder_2": _t5}
HUNYUAN: Encoders = {"text_encoder": _qwen25, "text_encoder_2": _byt5}
SD3: Encoders = {"text_encoder": _clip_with_projection, "text_encoder_2": _clip_large, "text_encoder_3": _t5}
QWEN: Encoders = {"text_encoder": lambda: _published_encoder("Qwen-Image", "Qwen2_5_VLForConditionalGeneration")}
Z_IMAGE: Encoders = {"text_encoder": lambda: _qwen3("Qwen3Model")}

ENCODERS: Mapping[str, Encoders] = {
    "Cosmos3-Nano": {},
    "Cosmos3-Super": {},
    **dict.fromkeys(("FLUX.1-Kontext-dev", "FLUX.1-dev", "FLUX.1-schnell"), FLUX),
    "FLUX.2-dev": {"text_encoder": lambda: _published_encoder("FLUX.2-dev", "Mistral3ForConditionalGeneration")},
    "FLUX.2-klein-4B": {"text_encoder": lambda: _qwen3("Qwen3ForCausalLM")},
    "Helios-Base": WAN,
    **dict.fromkeys(("HunyuanVideo-1.5-480p_t2v", "HunyuanVideo-1.5-720p_t2v"), HUNYUAN),
    "LTX-Video": {"text_encoder": _t5},
    **dict.fromkeys(("Qwen-Image", "Qwen-Image-2512"), QWEN),
    **dict.fromkeys(("Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-I2V-A14B", "Wan2.2-T2V-A14B", "Wan2.2-TI2V-5B"), WAN),
    **dict.fromkeys(("Z-Image", "Z-Image-Turbo"), Z_IMAGE),
    **dict.fromkeys(("stable-diffusion-3-medium", "stable-diffusion-3.5-large", "stable-diffusion-3.5-medium"), SD3),
    "stable-diffusion-xl-base-1.0": {"text_encoder": _clip, "text_encoder_2": _clip_large},
}
"""Text encoders by model and part."""
TWO_CLIPS = ("stable-diffusion-3-medium", "stable-diffusion-3.5-large", "stable-diffusion-3.5-medium")
LENGTHS: Mapping[str, Mapping[str, int]] = {
    **{name: {"tokenizer": CLIP_LENGTH} for name in ("FLUX.1-Kontext-dev", "FLUX.1-dev", "FLUX.1-schnell")},
    **{
        name: {"tokenizer": CLIP_LENGTH, "tokenizer_2": CLIP_LENGTH}
        for name in (*TWO_CLIPS, "stable-diffusion-xl-base-1.0")
    },
}
"""What tokenizers cut prompts to by model and part, where it is not the usual length."""
UNGUARDED: Mapping[str, Mapping[str, Any]] = {
    name: {"enable_safety_checker": False} for name in ("Cosmos3-Nano", "Cosmos3-Super")
}
"""Settings of the pipeline: what a guardrail makes of noise tells nothing."""
