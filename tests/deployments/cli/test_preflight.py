"""Before anything starts, a line says why a configuration cannot run and what to change."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelines
from deployments.cli import preflight
from deployments.cli.preflight import check, num_gpus_needed, problems, warnings, with_metrics_port
from deployments.cli.serving import load_config, parse_config
from deployments.config import CONFIGS, ServeConfig
from deployments.door.door import listen
from pipelines.checkpoint import Checkpoint
from pipelines.loading import SHIPPED
from tests.deployments.support.commands import assert_one_line, config_file, troupe
from tests.deployments.support.live import config_of
from tests.support.certificates import Authority, Issued
from tests.support.fenced import blocks


def with_model(**model: Any) -> ServeConfig:
    document = config_of({"pictures": Path("flux-shapes")}).model_dump(mode="json")
    document["applications"][0]["args"]["models"][0] |= model
    return parse_config(document)


UNGRAPHED = str(Path(pipelines.__file__).parent / "published" / "Z-Image")

FAULTS: dict[str, tuple[Callable[[], ServeConfig], str]] = {
    "a folder that is not there": (lambda: with_model(path="/nowhere/flux"), "the model pictures: no model '/nowhere/"),
    "a hub id, offline": (lambda: with_model(path="owner/name"), "the model pictures: "),
    "a model that its engine does not take": (
        lambda: with_model(path=UNGRAPHED, denoiser={"engine": "tensorrt", "gpus_per_rank": 1}),
        "which no TensorRT engine does: use engine: torch",
    ),
    "an adapter that is not there": (
        lambda: with_model(loras=[{"path": "/nowhere/ink.safetensors"}]),
        "the model pictures: no adapter '/nowhere/ink.safetensors'",
    ),
    "a key of a prompt enhancer that is not set": (
        lambda: with_model(prompt_enhancer={"url": "http://a/v1", "model": "m", "api_key_variable": "NOT_SET_HERE"}),
        "prompt_enhancer.api_key_variable: the environment variable NOT_SET_HERE is not set",
    ),
    "an adapter for a part that is not there": (
        lambda: with_model(loras=[{"path": "owner/name", "part": "transformer_2"}]),
        "an adapter for part 'transformer_2', which the model does not have",
    ),
    "memory of a decoder that has no such thing": (
        lambda: with_model(path="wan-shapes", decoder={"memory_gib": 4}),
        "decoder.memory_gib is for auto-encoders of pictures with group norms",
    ),
    "shares of weights on one rank": (
        lambda: with_model(denoiser={"load": "sliced", "num_ranks": 1}),
        "the model pictures: load: sliced needs the engine torch and several ranks, not torch on 1",
    ),
    "more GPUs than there are": (
        lambda: with_model(denoiser={"num_ranks": 2, "gpus_per_rank": 0.8}),
        "asks for 2 GPUs and this machine has 1: take a shipped one that fits (gpu1, laptop)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_serve_says_it_at_once(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, told = FAULTS[fault]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = config_file(make(), tmp_path)
    result = troupe("serve", config, "--port", "0")
    assert result.exit_code == 2, result.output
    *warnings, line = result.stderr.splitlines()
    assert told in line
    assert all("on CPU cores" in warning for warning in warnings), result.stderr
    doctor = troupe("doctor", "--config", config)
    assert doctor.exit_code == 1


def test_keys_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(tmp_path / "keys"))
    with pytest.raises(ValueError, match=r"the API keys cannot be read: .*keys"):
        check(config_of({"pictures": Path("flux-shapes")}))


def test_all_faults_are_told_together() -> None:
    config = with_model(path="nowhere", decoder={"num_gpus": 64})
    assert len(list(problems(config))) == 2
    recipes = {
        "draft": {"num_inference_steps": 300},
        "usual": {"num_inference_steps": 4},
        "ink": {"lora": [{"name": "ink"}]},
    }
    found = list(problems(with_model(recipes=recipes, qualities={"low": "none", "high": "nor this"})))
    assert found == [
        f"the model pictures: {problem}"
        for problem in (
            "qualities.low of pictures is 'none'; the model's recipes: draft, usual, ink",
            "qualities.high of pictures is 'nor this'; the model's recipes: draft, usual, ink",
            "the recipe draft of pictures: num_inference_steps is 300; it must be from 1 to 100",
            "the recipe ink of pictures: the model has no adapter ink; its adapters: none",
        )
    ]


def test_a_configuration_that_can_run(tmp_path: Path) -> None:
    config = config_of({"pictures": Path("flux-shapes")})
    assert list(problems(config)) == []
    result = troupe("doctor", "--config", config_file(config, tmp_path))
    assert result.exit_code == 0, result.output
    assert "can run here" in result.output


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = config_of({"pictures": Path("flux-shapes")}).with_http(port=listener.getsockname()[1])
        path = config_file(config, tmp_path)
        assert_one_line(troupe("serve", path), "is taken by another program", "--port")
        assert troupe("doctor", "--config", path).exit_code == 1


def test_a_port_that_is_taken_is_told_once_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def listen_once(host: str, port: int) -> socket.socket:
        tried.append(port)
        return listen(host, port)

    monkeypatch.setattr("deployments.cli.preflight.listen", listen_once)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = config_of({"pictures": Path("flux-shapes")}).with_http(port=port)
        (problem,) = problems(config.with_metrics(port))
    assert "is taken by another program" in problem
    assert tried == [port]


def test_a_port_for_metrics_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = config_of({"pictures": Path("flux-shapes")}).with_metrics(port)
        assert_one_line(troupe("serve", config_file(config, tmp_path)), "cannot show metrics", "--metrics-port")
        assert list(problems(config.with_metrics(None))) == []
    assert list(problems(config)) == []
    (problem,) = problems(config.with_http(port=port))
    assert "the API's own port" in problem


def test_a_port_for_metrics_that_nobody_chose_is_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config, wanted = load_config("laptop").with_http(port=0), preflight.NUM_METRICS_PORTS
    assert (config.app.metrics.port, config.app.metrics.number) == ("auto", 9464)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(preflight, "DEFAULT_PORT", taken)
        assert list(problems(config)) == []
        found = with_metrics_port(config).app.metrics.number
        assert found is not None
        assert taken < found < taken + wanted
        listen("127.0.0.1", found).close()
        beside = with_metrics_port(config.with_http(port=found)).app.metrics.number
        assert beside is not None
        assert beside > found, "the API has that port"
        chosen = config.with_metrics(taken)
        assert with_metrics_port(chosen) is chosen
        assert "cannot show metrics" in next(problems(chosen))
        monkeypatch.setattr(preflight, "NUM_METRICS_PORTS", 1)
        (problem,) = problems(config)
        assert problem.startswith(f"no port of 127.0.0.1 from {taken} to {taken} is free for metrics: choose one")
    assert with_metrics_port(config).app.metrics.number == taken
    assert with_metrics_port(config.with_metrics(None)).app.metrics.number is None


@pytest.mark.parametrize(("name", "expected"), [("laptop", 0), ("gpu1", 1), ("gpu2", 2), ("gpu4", 4), ("gpu8", 8)])
def test_gpus_that_a_start_needs(name: str, expected: int) -> None:
    assert num_gpus_needed(load_config(name)) == expected


def test_shipped_configurations_that_fit_are_found_by_what_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    told = [one for one in problems(load_config("gpu8")) if "asks for 8 GPUs" in one]
    assert "(gpu1, gpu2, laptop)" in told[0]
    for name, shipped in (("gpu3", "gpu2"), ("gpu1", "gpu8"), ("desktop", "laptop")):
        (tmp_path / f"{name}.yaml").write_text((CONFIGS / f"{shipped}.yaml").read_text())
    config = load_config("gpu8")
    monkeypatch.setattr(preflight, "CONFIGS", tmp_path)
    told = [one for one in problems(config) if "asks for 8 GPUs" in one]
    assert "(desktop, gpu3)" in told[0]


def test_models_that_share_gpus_need_them_once_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    document = load_config("gpu2").model_dump(mode="json")
    args = document["applications"][0]["args"]
    first = args["models"][0] | {"share": "main"}
    args["models"] = [first, first | {"name": "other", "denoiser": first["denoiser"] | {"num_ranks": 1}}]
    assert num_gpus_needed(parse_config(document)) == 2
    args["models"] = [one | {"share": ""} for one in args["models"]]
    assert num_gpus_needed(parse_config(document)) == 3
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    shared = ("flux-shapes", "wan-shapes")
    config = config_of({name: Path("pipelines/checkpoints") / name for name in shared}, gpus_per_rank=0.8)
    document = config.model_dump(mode="json")
    for model in document["applications"][0]["args"]["models"]:
        model["share"] = "main"
    told = [one for one in problems(parse_config(document)) if "torch-memory-saver" in one]
    assert told == ["flux-shapes, wan-shapes share GPUs, which needs torch-memory-saver: pip install '.[sleep]'"]


def problems_of(folder: Path) -> str:
    return "; ".join(problems(config_of({"pictures": folder})))


def test_weights_that_are_not_there_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "flux"
    shutil.copytree(SHIPPED / "flux-shapes", folder)
    assert problems_of(folder) == ""
    (encoder,) = (folder / "text_encoder").glob("*.safetensors")
    encoder.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n")
    (decoder,) = (folder / "vae").glob("*.safetensors")
    decoder.write_bytes(decoder.read_bytes()[:-1])
    (transformer,) = (folder / "transformer").glob("*.safetensors")
    transformer.unlink()
    told = problems_of(folder)
    assert f"{encoder} is no safetensors file" in told
    assert f"{decoder} is no safetensors file, or not the whole of one" in told
    assert f"{transformer.parent} has no weights" in told
    index = {"weight_map": {"proj_out.weight": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    transformer.with_name(f"{transformer.name}.index.json").write_text(json.dumps(index))
    assert "names files that are not there: diffusion_pytorch_model-00002-of-00002" in problems_of(folder)


@pytest.mark.parametrize("options", [{"memory_gib": 4}, {"compile": True}, {"num_devices": 2}])
def test_what_a_decoder_can_do_is_known_before_it_is_loaded(options: dict[str, Any]) -> None:
    """The decoder itself raises the same error when it is made."""
    for path in ("flux-shapes", "wan-shapes"):
        own = ""
        try:
            checkpoint = Checkpoint.open(path)
            memory_bytes = 2**32 if "memory_gib" in options else None
            others = ["cpu"] if "num_devices" in options else []
            checkpoint.decoder(compiled="compile" in options, memory_bytes=memory_bytes, others=others)
        except ValueError as error:
            own = f"the model pictures: {error}"
        assert "; ".join(problems(with_model(path=path, decoder=options))) == own


def signing(issued: Issued) -> ServeConfig:
    provenance = {"certificate": str(issued.certificate), "key": str(issued.key)}
    return config_of({"pictures": Path("flux-shapes")}, api={"provenance": provenance})


def test_credentials_that_cannot_sign_are_told_before_anything_starts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    of_another = Issued(certificate=authority.issue().certificate, key=authority.issue("other").key)
    path = config_file(signing(of_another), tmp_path)
    assert_one_line(troupe("serve", path, "--port", "0"), "api.provenance: the key ", "other.key is not that of the")
    doctor = troupe("doctor", "--config", path)
    assert doctor.exit_code == 1
    assert "is not that of the first certificate" in " ".join(doctor.output.replace("│", " ").split())


def test_a_package_that_signs_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pipelines.media.provenance", raising=False)
    monkeypatch.setitem(sys.modules, "c2pa", None)
    (problem,) = problems(signing(Authority(tmp_path).issue()))
    assert problem == "api.provenance: c2pa is not installed, which signs files: pip install '.[provenance]'"


def test_credentials_that_can_sign_and_their_last_days(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue()
    issued.key.chmod(0o600)
    config = signing(issued)
    assert list(problems(config)) == []
    (warning,) = warnings(config)
    assert warning.startswith(f"{issued.certificate} is valid until 20")
    issued.key.chmod(0o644)
    assert list(warnings(config))[1] == f"other users can read {issued.key}: `chmod go= {issued.key}`"


def test_the_chain_of_the_documents_signs(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("docs/use/files.md") if "openssl req" in block.text)
    subprocess.run(["bash", "-eu", "-c", block.text], cwd=tmp_path, check=True, capture_output=True)
    assert list(problems(signing(Issued(certificate=tmp_path / "sign.pem", key=tmp_path / "sign.key")))) == []
