"""A configuration lists a model's adapters, and errors name what is wrong."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any

import pytest
import yaml

from deployments.cli.serving import parse_config
from deployments.config import CONFIGS
from deployments.http.answers import Model
from deployments.ingress import make_cards
from deployments.requests.bodies import VideoBody
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import RequestRules
from deployments.requests.validation import validated
from pipelines.loading import resolve_configuration
from pipelines.lora.source import LoraLimits, LoraSource
from pipelines.request import Lora

LAPTOP = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
ALWAYS = {"path": "owner/always", "scale": 0.5}
INK = {"name": "ink", "path": "inks", "file": "a.safetensors", "scale": 0.7}
INK_2 = {"name": "ink", "path": "b.safetensors", "scale": 0.7, "part": "transformer_2"}


def served_with(loras: Any, **denoiser: Any) -> Any:
    document = copy.deepcopy(LAPTOP)
    model = document["applications"][0]["args"]["models"][0]
    model |= {"loras": loras, "recipes": {}}
    model["denoiser"] |= denoiser
    return parse_config(document).app


def test_adapters_with_and_without_a_name() -> None:
    app = served_with([ALWAYS, INK, INK_2, {"name": "oil", "path": "oil"}])
    assert app.models[0].loras[:2] == (
        LoraSource(path="owner/always", scale=0.5),
        LoraSource(name="ink", path="inks", file="a.safetensors", scale=0.7),
    )
    cards = make_cards(app)
    assert cards["flux-shapes"].loras == (Lora(name="ink", scale=0.7), Lora(name="oil"))
    assert cards["wan-shapes"].loras == ()


@pytest.mark.parametrize(
    ("loras", "denoiser", "message"),
    [
        ([{"name": "ink"}], {}, "loras.0.path is missing"),
        ([{"path": ""}], {}, "an adapter needs a path"),
        ([{**INK, "weight": 1}], {}, "loras.0.weight is no key here: known: path, file, name, scale, part"),
        ([{**INK, "name": "a:b"}], {}, "'a:b' is no name for an adapter"),
        ([{**INK, "scale": 11}], {}, "scale is 11; it must be from -10 to 10"),
        ([{**INK, "scale": ".nan"}], {}, "scale"),
        ([INK, INK], {}, "two adapters are named 'ink'"),
        ([INK, {**INK_2, "scale": 1}], {}, "the adapters named 'ink' have different scales"),
        ([INK], {"engine": "tensorrt", "gpus_per_rank": 1}, "engine: tensorrt takes no loras"),
        ([ALWAYS], {"engine": "tensorrt", "gpus_per_rank": 1}, "engine: tensorrt takes no loras"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(loras: Any, denoiser: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served_with(loras, **denoiser)


@pytest.mark.parametrize("precision", ["native", "fp8", "int8"])
def test_adapters_go_with_every_precision(precision: str) -> None:
    loras = (LoraSource(**ALWAYS), LoraSource(**INK))  # type: ignore[arg-type]
    assert served_with([ALWAYS, INK], precision=precision).models[0].loras == loras


def test_clients_may_add_adapters_where_the_configuration_says_so() -> None:
    document = copy.deepcopy(LAPTOP)
    model = document["applications"][0]["args"]["models"][0]
    model["runtime_loras"] = {"max_loaded": 3}
    cards = make_cards(parse_config(document).app)
    assert cards["flux-shapes"].runtime_loras == LoraLimits(max_loaded=3)
    assert cards["wan-shapes"].runtime_loras is None
    model["runtime_loras"] = {"memory_gib": 0}
    with pytest.raises(ValueError, match="memory_gib is 0"):
        parse_config(document)
    model["runtime_loras"] = {}
    model["denoiser"] |= {"engine": "tensorrt", "gpus_per_rank": 1}
    with pytest.raises(ValueError, match="engine: tensorrt takes no loras"):
        parse_config(document)


IN_CONTEXT = {"path": "owner/ic-lora"}


@pytest.mark.parametrize(
    ("served", "lora", "refusal"),
    [
        ({}, (), "this model takes no input clip"),
        ({"loras": [{**IN_CONTEXT, "name": "ic"}]}, ("ic",), None),
        ({"loras": [{**IN_CONTEXT, "name": "ic"}]}, (), "context of an adapter (IC-LoRA), and the request names none"),
        ({"recipes": {"ic": IN_CONTEXT}}, ("ic",), None),
        ({"runtime_loras": {}}, (), "context of an adapter (IC-LoRA), and the request names none"),
        ({"loras": [IN_CONTEXT]}, (), None),
    ],
)
def test_a_clip_as_an_adapters_context_is_taken_beside_an_adapter(
    served: dict[str, Any], lora: tuple[str, ...], refusal: str | None
) -> None:
    document = copy.deepcopy(LAPTOP)
    model = document["applications"][0]["args"]["models"][0]
    model |= {"path": str(resolve_configuration("LTX-2")), "recipes": {}, **served}
    card = make_cards(parse_config(document).app)[model["name"]]
    body = validated(VideoBody, {"prompt": "a", "video": b"-", "lora": [{"name": name} for name in lora]})
    assert ("video-to-video" in Model.of(card).capabilities) == bool(served)
    with pytest.raises(RequestError, match=re.escape(refusal)) if refusal else nullcontext():
        RequestRules(card).check_sources(body)
    assert RequestRules(card).check_sources(VideoBody(prompt="a")).video is None
