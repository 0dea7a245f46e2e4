"""A wrong configuration gives one line a mistake, with its place and the key that was probably meant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from deployments.cli.serving import parse_config
from deployments.config import CONFIGS
from deployments.model_config import ModelConfig
from deployments.requests.validation import nearest_name
from tests.deployments.support.commands import assert_one_line, troupe

LAPTOP: dict[str, Any] = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())


def models(document: dict[str, Any]) -> list[Any]:
    """Return the models of the laptop: flux-shapes, wan-shapes and kontext-shapes."""
    found: list[Any] = document["applications"][0]["args"]["models"]
    return found


def in_all_models(document: dict[str, Any]) -> None:
    for model in models(document):
        model["denoiser"]["num_rank"] = 2


def in_some_and_elsewhere(document: dict[str, Any]) -> None:
    models(document)[0]["denoiser"]["autoscaling"] = {"min_replica": 0}
    models(document)[1]["decoder"] = {"num_threds": 2}
    document["http_options"]["prot"] = 1


def misspelt_section(document: dict[str, Any]) -> None:
    args = document["applications"][0]["args"]
    args["modles"] = args.pop("models")


def truth_values_for_numbers(document: dict[str, Any]) -> None:
    first = models(document)[0]
    first["denoiser"]["num_ranks"] = True
    first["recipes"]["four-steps"]["flow_shift"] = False
    first["loras"] = [{"path": "flux-shapes", "file": "recipes/four-steps.safetensors", "name": "own", "scale": True}]
    document["http_options"]["port"] = False


CASES: list[tuple[Callable[[dict[str, Any]], Any], list[str]]] = [
    (
        in_all_models,
        ["models.{flux-shapes, wan-shapes, kontext-shapes}.denoiser.num_rank is no key here: did you mean num_ranks?"],
    ),
    (
        in_some_and_elsewhere,
        [
            "http_options.prot is no key here: did you mean port?",
            "models.flux-shapes.denoiser.autoscaling.min_replica is no key here: did you mean min_replicas?",
            "models.wan-shapes.decoder.num_threds is no key here: did you mean num_threads?",
        ],
    ),
    (
        truth_values_for_numbers,
        [
            "http_options.port is false: it must be a number (YAML reads off and no as false)",
            "models.flux-shapes.recipes.four-steps.flow_shift is false: it must be a number (YAML reads off and no as "
            "false)",
            "models.flux-shapes.denoiser.num_ranks is true: it must be a number",
            "models.flux-shapes.loras.0.scale is true: it must be a number",
        ],
    ),
    (misspelt_section, ["modles is no key here: did you mean models?"]),
    (
        lambda document: models(document)[0]["recipes"]["four-steps"].update(steps=4, cache=False),
        [
            "models.flux-shapes.recipes.four-steps.cache is false: it must be off, conservative or fast (YAML reads "
            'off as false: write "off")',
            "models.flux-shapes.recipes.four-steps.steps is no key here: did you mean num_inference_steps?",
        ],
    ),
    (
        lambda document: models(document)[0].update(recipes={"hands-off": {"scheduler": False}}),
        ["models.flux-shapes.recipes.hands-off.scheduler is false: it must be text"],
    ),
    (
        lambda document: models(document)[0]["denoiser"].update(nccl={"max_cta": 3}, torch={"peer": "no"}),
        [
            "models.flux-shapes.denoiser.nccl.max_cta is no key here: did you mean max_ctas?",
            "models.flux-shapes.denoiser.torch.peer is no key here: did you mean peer_memory?",
        ],
    ),
    (
        lambda document: models(document)[0].update(warm=1),
        [f"models.flux-shapes.warm is no key here: known: {', '.join(ModelConfig.model_fields)}"],
    ),
    (
        lambda document: models(document)[0]["denoiser"].update(num_ranks="two"),
        ["models.flux-shapes.denoiser.num_ranks is 'two': it must be a whole number"],
    ),
    (
        lambda document: document["applications"][0]["args"].update(metrics={"port": "any"}),
        ["metrics.port is 'any': it must be a whole number or auto"],
    ),
    (
        lambda document: models(document)[0]["denoiser"].update(torch={"peer_memory": 2}),
        ["models.flux-shapes.denoiser.torch.peer_memory is 2: it must be true or false or auto"],
    ),
    (lambda document: models(document)[0].update(path=None), ["models.flux-shapes.path is null: it must be text"]),
    (lambda document: models(document)[0].pop("name"), ["models.0.name is missing"]),
    (
        lambda document: models(document)[0].update(denoiser=3),
        ["models.flux-shapes.denoiser is 3: it must be a section"],
    ),
    (lambda document: models(document).clear(), ["models is []: it must have at least 1 entry"]),
    (lambda document: document["http_options"].update(port=99_999), ["http_options.port is 99999: it must be at most"]),
    (
        lambda document: models(document)[1].update(aliases=["flux-shapes"]),
        ["the configuration: model names and aliases must differ, given: flux-shapes, wan-shapes, flux-shapes"],
    ),
    (
        lambda document: models(document)[0].update(aliases=["a b"]),
        ["models.flux-shapes.aliases.0: 'a b' is no name for a model"],
    ),
    (lambda document: document.clear(), ["http_options is missing", "applications is missing"]),
]


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_a_line_for_each_mistake(change: Callable[[dict[str, Any]], Any], expected: list[str]) -> None:
    document = copy.deepcopy(LAPTOP)
    change(document)
    with pytest.raises(ValueError, match=r".") as caught:
        parse_config(document)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(expected), lines
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning), line
        assert ("YAML" in line) == ("YAML" in beginning), line


@pytest.mark.parametrize("document", [None, [1], "flux-shapes", 3])
def test_what_is_no_configuration_at_all(document: Any) -> None:
    with pytest.raises(ValueError, match=r"the configuration is .*: it must be a section of keys and values"):
        parse_config(document)


def test_the_command_says_it_in_one_line(tmp_path: Any) -> None:
    document = copy.deepcopy(LAPTOP)
    in_all_models(document)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    result = troupe("serve", str(tmp_path / "config.yaml"))
    assert_one_line(result, "num_rank ", "flux-shapes, wan-shapes", "did you mean num_ranks?")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_rankz", "num_ranks"),
        ("ranks", "num_ranks"),
        ("steps", "num_inference_steps"),
        ("sed", "seed"),
        ("guidance", "guidance_scale"),
        ("input_reference", ""),
        ("x" * 1_000_000, ""),
    ],
)
def test_nearest_name(name: str, meant: str) -> None:
    known = ("style", "seed", "num_ranks", "num_inference_steps", "guidance_scale")
    assert nearest_name(name, known) == meant
