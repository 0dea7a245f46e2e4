"""Options of a benchmark set values of the configuration, and choose a folder's model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.serving import settings
from benchmarks.serving.settings import add_options, config_of, with_folder, with_values
from deployments.cli.serving import load_config


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def test_values_are_those_of_every_model() -> None:
    told = ("denoiser.elastic=true", "denoiser.torch.peer_memory=false", "denoiser.warm_sizes=[64x64, 128x96]")
    models = config_of(arguments("--set", *told[:2], "--set", told[2])).app.models
    assert [model.name for model in models] == [model.name for model in load_config("laptop").app.models]
    for model in models:
        assert model.denoiser.elastic
        assert model.denoiser.torch is not None
        assert model.denoiser.torch.peer_memory is False
        assert [str(size) for size in model.denoiser.warm_sizes] == ["64x64", "128x96"]
        assert model.stages == "together", "all else is as before"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("denoiser.elastic", "sets nothing; write KEY=VALUE"),
        ("denoiser.elastik=true", "elastik is no key here: did you mean elastic"),
        ("denoiser.num_ranks=two", "'two': it must be a whole number"),
        ("denoiser.warm_sizes=[", "is not YAML"),
    ],
)
def test_what_cannot_be_set_is_said(told: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_values(load_config("laptop"), [told])


def test_the_model_of_a_folder_is_served_alone(tmp_path: Path) -> None:
    (own, *_) = load_config("gpu2").app.models
    config = config_of(arguments("--config", "gpu2", "--folder", str(tmp_path), "--set", "denoiser.elastic=true"))
    (model,) = config.app.models
    assert (model.path, model.name) == (str(tmp_path), "full")
    assert model.decoder == own.decoder
    assert (model.denoiser.num_ranks, model.denoiser.elastic) == (2, True)


def test_a_model_is_written_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(name: str, folder: Path) -> None:
        folder.mkdir()
        written.append(name)

    monkeypatch.setattr(settings, "write_model", write)
    asked = arguments("--folder", str(tmp_path / "there"), "--model", "FLUX.1-dev")
    for _ in range(2):
        assert config_of(asked).app.models[0].path == str(tmp_path / "there")
    assert written == ["FLUX.1-dev"]


def test_a_folder_and_its_model_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder; --model names what is written there"):
        with_folder(load_config("gpu2"), tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"--model FLUX\.1-dev needs a --folder"):
        config_of(arguments("--model", "FLUX.1-dev"))
