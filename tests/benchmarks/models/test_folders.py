"""A folder that the benchmark writes from a configuration alone is a whole model."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.models import folders
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config, read_index
from pipelines.loading import resolve_configuration
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_cosmos,
    tiny_hunyuan,
    tiny_minimax,
    tiny_pictures,
    tiny_qwen,
)
from tests.pipelines.support.checkpoints.tiny_qwen import qwen_vl


def tiny_clip() -> Any:
    """Return an encoder of the width of ``tiny.flux``, for prompts of the published length."""
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(**sizes, max_position_embeddings=folders.CLIP_LENGTH, eos_token_id=101))


def tiny_t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    return T5EncoderModel(T5Config(**sizes, vocab_size=128, feed_forward_proj="gated-gelu"))


def without_weights(published: Path) -> Path:
    """Remove weights and text encoders' configurations, which published configurations do not have."""
    for file in (*published.glob("**/*.safetensors"), *published.glob("text_encoder*/config.json")):
        file.unlink()
    return published


def test_what_is_written_makes_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = without_weights(tiny_cosmos.cosmos_with_sound(tmp_path / "published"))
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    folders.write_folder("Cosmos3-Nano", tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    request = checkpoint.defaults.request(Size(width=64, height=32, num_frames=5), num_inference_steps=1)
    assert load_pipeline(checkpoint).run(request).shape == (5, 32, 64, 3)


def test_hunyuan_video_reads_prompts_and_words_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HunyuanVideo-1.5-480p_t2v"
    published = without_weights(tiny_hunyuan.hunyuan_video(tmp_path / "published"))
    monkeypatch.setattr(folders, "resolve_configuration", lambda _: published)
    encoders = {"text_encoder": lambda: qwen_vl().model.language_model, "text_encoder_2": tiny_t5}
    monkeypatch.setattr(folders, "ENCODERS", {name: encoders})
    folders.write_folder(name, tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    size = Size(width=64, height=32, num_frames=5)
    request = checkpoint.defaults.request(size, num_inference_steps=1, prompt='a wall with the words "no entry"')
    assert load_pipeline(checkpoint).run(request).shape == (5, 32, 64, 3)


def test_flux_reads_77_tokens_by_clip_and_512_by_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = without_weights(tiny.flux(tmp_path / "published"))
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    encoders = {"text_encoder": tiny_clip, "text_encoder_2": tiny_t5}
    monkeypatch.setattr(folders, "ENCODERS", {"FLUX.1-dev": encoders})
    folders.write_folder("FLUX.1-dev", tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    request = checkpoint.defaults.request(Size(width=48, height=32), num_inference_steps=1, prompt=200 * "abc")
    pipeline = load_pipeline(checkpoint)
    shapes = {name: tuple(value.shape) for name, value in pipeline.text_encoder.encode(request).values.items()}
    assert shapes["prompt_embeds"] == (1, 512, 48)
    assert shapes["pooled_prompt_embeds"] == (1, 32)
    assert pipeline.run(request).shape == (1, 32, 48, 3)
    for part, length in {"tokenizer": 77, "tokenizer_2": 512}.items():
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "written" / part)
        tokens = tokenizer(200 * "abc", truncation=True).input_ids
        assert (len(tokens), tokens[-1]) == (length, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("name", "made", "encoder", "tokenizer"),
    [
        ("FLUX.2-dev", tiny_pictures.flux2_dev, tiny_pictures.mistral3, "PixtralProcessor"),
        ("Qwen-Image", tiny_qwen.qwen, tiny_qwen.qwen_vl, "Qwen2Tokenizer"),
    ],
)
def test_encoders_with_a_part_for_pictures_read_prompts(
    name: str, made: Any, encoder: Any, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = without_weights(made(tmp_path / "published"))
    index = json.loads((published / "model_index.json").read_text())
    (published / "model_index.json").write_text(json.dumps(index | {"tokenizer": ["transformers", tokenizer]}))
    monkeypatch.setattr(folders, "resolve_configuration", lambda _: published)
    monkeypatch.setattr(folders, "ENCODERS", {name: {"text_encoder": lambda: with_letters(encoder())}})
    folders.write_folder(name, tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    request = checkpoint.defaults.request(Size(width=64, height=32), num_inference_steps=1, prompt="a red ball")
    assert load_pipeline(checkpoint).run(request).shape == (1, 32, 64, 3)


def with_letters(encoder: Any) -> Any:
    """Return ``encoder`` with a row for each token of ``folders.letters``."""
    encoder.resize_token_embeddings(len(folders.letters()), mean_resizing=False)
    return encoder


@pytest.mark.parametrize(("name", "billion"), [("Qwen-Image", 8.29), ("FLUX.2-dev", 24.01)])
def test_encoders_are_as_large_as_the_published_ones(name: str, billion: float) -> None:
    with torch.device("meta"):
        encoder = folders.ENCODERS[name]["text_encoder"]()
    assert sum(weight.numel() for weight in encoder.parameters()) / 1e9 == pytest.approx(billion, abs=0.005)


def test_transformers_with_one_configuration_may_be_one_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = without_weights(tiny.wan22(tmp_path / "published"))
    monkeypatch.setattr(folders, "resolve_configuration", lambda _: published)
    monkeypatch.setattr(folders, "ENCODERS", {"Wan2.2-T2V-A14B": {}})
    for twins in (False, True):
        folder = tmp_path / f"written_{twins}"
        folders.write_folder("Wan2.2-T2V-A14B", folder, torch.device("cpu"), twins=twins)
        assert (folder / "transformer_2").is_symlink() == twins
        modules = Checkpoint(folder).denoiser().modules
        first, second = (modules[name].state_dict() for name in ("transformer", "transformer_2"))
        assert all(torch.equal(x, second[key]) for key, x in first.items()) == twins


def test_the_published_clip_has_places_for_no_more() -> None:
    with torch.device("meta"):
        assert folders.ENCODERS["FLUX.1-dev"]["text_encoder"]().config.max_position_embeddings == 77


def test_every_encoder_is_of_the_class_that_the_pipeline_names() -> None:
    made = {make: cache(make) for encoders in folders.ENCODERS.values() for make in encoders.values()}
    with torch.device("meta"):
        for name, encoders in folders.ENCODERS.items():
            index = read_index(resolve_configuration(name))
            named = {part: entry[1] for part, entry in index.items() if isinstance(entry, list) and "coder" in part}
            models = {part: kind for part, kind in named.items() if index[part][0] == "transformers"}
            if name != "Wan2.2-I2V-A14B":
                assert models.keys() == encoders.keys(), name
            assert {part: type(made[make]()).__name__ for part, make in encoders.items()} == models


@pytest.mark.parametrize("name", folders.TWO_CLIPS)
def test_both_clips_make_as_many_features_as_the_transformer_takes(name: str) -> None:
    transformer, clips = read_config(resolve_configuration(name), "transformer"), ("text_encoder", "text_encoder_2")
    with torch.device("meta"):
        made = [folders.ENCODERS[name][part]().config.projection_dim for part in clips]
    assert sum(made) == transformer["pooled_projection_dim"]


def test_what_decodes_has_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(folders, "_save", lambda model, folder: made.append(f"{folder.name}: {type(model).__name__}"))
    folders.write_vae("LTX-2", tmp_path / "vae", torch.device("meta"))
    assert sorted(made) == ["audio_vae: AutoencoderKLLTX2Audio", "vae: AutoencoderKLLTX2Video", "vocoder: LTX2Vocoder"]


def test_what_decodes_has_the_statistics_that_a_configuration_leaves_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published configuration of MiniMax-H3's sound has no mean of its latents."""
    published = without_weights(tiny_minimax.minimax_h3(tmp_path / "published"))
    file = published / "audio_vae" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: x for key, x in config.items() if not key.startswith("latents_")}))
    (published / "modular_model_index.json").unlink()
    shutil.copy(resolve_configuration("MiniMax-H3") / "model_index.json", published)
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    folders.write_vae("MiniMax-H3", tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    request = checkpoint.defaults.request(Size(width=64, height=32, num_frames=120), num_inference_steps=1)
    sizes = {"latents": (1, 4, 37, 2, 4), "audio_latents": (2, 4, 207)}
    latents = {name: torch.zeros(size) for name, size in sizes.items()}
    media = checkpoint.decoder().decode_all({**latents, "output_type": "pt"}, request)
    assert media.frames_FHWC.shape == (120, 32, 64, 3)
    assert media.sound is not None


def test_a_model_whose_encoders_are_not_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no text encoders are known for LTX-2; known: Cosmos3-Nano, Cosmos3-Super, FLUX"
    ):
        folders.write_folder("LTX-2", tmp_path / "written", torch.device("cpu"))
