"""Compare adapters added at run time with the same adapters in the configuration."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import load_file, save_file

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.lora.lora_cache import LoadedLora, LoraCache
from pipelines.lora.source import LORA_FILE, PEFT_CONFIG, AdapterError, LoraLimits
from pipelines.request import Lora
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.jobs import MODELS, ONE, TURNS, Served, Setting, folder_of, painted
from tests.pipelines.lora.support.tiny_lora import request_of

LIMITS = LoraLimits(max_loaded=1)
"""Each change of adapters evicts one, unless a running job holds it."""
CASES = [
    ("flux", Setting(num_ranks=2, fast=True, precision="fp8")),
    ("flux", Setting(num_ranks=2, strategy="tensor", precision="int8")),
    ("flux", Setting(num_ranks=2, strategy="tensor", sliced=True)),
    ("qwen", Setting(fast=True)),
    ("wan", Setting(precision="fp8")),
    ("z image", Setting(fast=True)),
]


@pytest.fixture
def added(served: Callable[[str], Served], tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return the folders of a model's two adapters by name."""

    def make(model: str) -> dict[str, str]:
        here = served(model)
        return {"one": folder_of(here.one, tmp_path / "a1"), "two": folder_of(here.two, tmp_path / "b2")}

    return make


@pytest.mark.parametrize(
    ("model", "setting"), CASES, ids=[f"{model}-{number}" for number, (model, _) in enumerate(CASES)]
)
def test_latents_are_those_with_configured_adapters(
    model: str, setting: Setting, served: Callable[[str], Served], added: Callable[[str], dict[str, str]]
) -> None:
    """Jobs alternate step by step, so an adapter is evicted and reloaded while others are in use."""
    here, folders, ranks = served(model), added(model), gang(setting.num_ranks)
    configured = [request_of(here.folder, loras) for loras in TURNS]
    runtime = [request_of(here.folder, tuple(replace(x, folder=folders[x.name]) for x in loras)) for loras in TURNS]
    expected = ranks.run(painted, here.folder, here.named, configured, setting)
    found = ranks.run(painted, here.folder, (), runtime, replace(setting, runtime_loras=LIMITS))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(one.equal(other) for one, other in zip(mine, theirs, strict=True))
        assert not mine[0].equal(mine[1]), "the adapter is there"


CAPTURED = [
    *(("flux", fast, precision) for fast, precision in ((False, "auto"), (True, "auto"), (True, "fp8"))),
    *((model, None, "auto") for model in MODELS if model != "flux"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "fast", "precision"), CAPTURED)
def test_captured_steps_follow_adapters_that_come(
    model: str,
    fast: bool | None,
    precision: str,
    served: Callable[[str], Served],
    added: Callable[[str], dict[str, str]],
    gpu_device: str,
) -> None:
    here, folders = served(model), added(model)
    setting = Setting(fast=fast, precision=precision, device=gpu_device, dtype=torch.bfloat16)
    configured = [request_of(here.folder, loras) for loras in TURNS]
    runtime = [request_of(here.folder, tuple(replace(x, folder=folders[x.name]) for x in loras)) for loras in TURNS]
    expected = painted(here.folder, here.named, configured, setting)
    found = painted(here.folder, (), runtime, replace(setting, runtime_loras=LIMITS))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    plain, one, _, again, one_again, last = found
    assert relative_difference(one, plain) > 0.05, "the adapter is there"
    for mine, other in ((again, plain), (one_again, one), (last, plain)):
        assert relative_difference(mine, other) < 1e-2, "a step as it comes, and one that is replayed"


def test_a_configured_adapter_beside_one_that_came(served: Callable[[str], Served], tmp_path: Path) -> None:
    """Both sums have one order: the name with its folder sorts like the name alone."""
    here, setting = served("flux"), Setting(fast=True)
    names = ("ink", "ink-2")
    first, second = (replace(source, name=name) for source, name in zip(here.named, names, strict=True))
    loras = (Lora(name="ink", scale=0.8), Lora(name="ink-2", scale=-0.5))
    came = replace(loras[0], folder=folder_of(here.one, tmp_path / "ffff"))
    (expected,) = gang(1).run(painted, here.folder, (first, second), [request_of(here.folder, loras)], setting)
    later = replace(setting, runtime_loras=LIMITS)
    (found,) = gang(1).run(painted, here.folder, (second,), [request_of(here.folder, (came, loras[1]))], later)
    assert found[0].equal(expected[0])


def painted_while_it_is_removed(folder: Path, loras: tuple[Lora, ...]) -> list[torch.Tensor]:
    """Return latents of alternating jobs with and without ``loras``, which are removed after a step."""
    checkpoint = Checkpoint(folder, runtime_loras=LoraLimits())
    model, sampler = checkpoint.denoiser(), checkpoint.sampler()
    assert isinstance(model.additions, LoraCache)
    requests = [request_of(folder, loras), request_of(folder)]
    conditioning = checkpoint.text_encoder().encode(requests[0])
    held = model.additions.for_request(requests[0])
    states = [sampler.begin(request, conditioning) for request in requests]
    with closing(TorchEngine(model, fast=True)) as engine:
        for _ in range(sampler.num_steps(states[0])):
            states = [sampler.advance(state, engine.predict(sampler.branches(state), (0,))) for state in states]
            for lora in loras:
                model.additions.remove(lora)
        assert (len(held), len(model.additions)) == (len(loras), 0)
    return [sampler.latents(state)["latents"] for state in states]


def test_a_job_ends_with_an_adapter_that_is_deleted_meanwhile(served: Callable[[str], Served], tmp_path: Path) -> None:
    here, (ink,) = served("flux"), ONE
    came = replace(ink, folder=folder_of(here.one, tmp_path / "a1"))
    requests = [request_of(here.folder, ONE), request_of(here.folder)]
    expected = painted(here.folder, here.named, requests, Setting(fast=True))
    found = painted_while_it_is_removed(here.folder, (came,))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def cache_of(folder: Path, **limits: Any) -> LoraCache:
    cache = Checkpoint(folder, runtime_loras=LoraLimits(**limits)).denoiser().additions
    assert isinstance(cache, LoraCache)
    return cache


def test_the_least_recently_used_leave_unless_a_request_holds_them(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    here = served("qwen")
    one, two, three = (Lora(name=x, folder=folder_of(here.one, tmp_path / x)) for x in ("one", "two", "three"))
    cache = cache_of(here.folder, max_loaded=2)
    held = cache.for_request(request_of(here.folder, (one, *ONE)))
    num_bytes = cache.load(two)
    assert num_bytes == held[0].num_bytes > 0
    cache.load(three)
    assert list(cache) == [two.key, three.key]
    assert one.key in cache, "a request holds it"
    assert cache[one.key] is held[0].addition
    assert list(cache) == [three.key, one.key]
    cache.load(two)
    cache.load(three)
    assert one.key in cache
    del held
    assert one.key not in cache
    held = cache.for_request(request_of(here.folder, (three,)))
    cache.remove(two)
    cache.remove(three)
    assert list(cache) == []
    assert cache[three.key] is held[0].addition, "a request holds it"
    assert cache.for_request(request_of(here.folder, (three,))) == held
    assert list(cache) == []
    del held
    assert three.key not in cache


def test_memory_bounds_what_is_loaded(served: Callable[[str], Served], tmp_path: Path) -> None:
    here = served("qwen")
    one, two = (Lora(name=x, folder=folder_of(here.one, tmp_path / x)) for x in ("one", "two"))
    num_bytes = cache_of(here.folder).load(one)
    cache = cache_of(here.folder, memory_gib=1.5 * num_bytes / 2**30)
    cache.load(one)
    cache.load(two)
    assert list(cache) == [two.key]
    with pytest.raises(ValueError, match=r"'one' takes 0\.00 GiB; it must be within .*memory_gib"):
        cache_of(here.folder, memory_gib=0.5 * num_bytes / 2**30).load(one)


def test_threads_read_a_file_once(served: Callable[[str], Served], tmp_path: Path) -> None:
    here = served("qwen")
    one = Lora(name="one", folder=folder_of(here.one, tmp_path / "one"))
    cache = cache_of(here.folder)
    held: list[LoadedLora] = []
    request = request_of(here.folder, (one,))
    threads = [threading.Thread(target=lambda: held.extend(cache.for_request(request))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 4
    assert len({id(loaded) for loaded in held}) == 1


def damaged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    key = next(iter(tensors))
    return {**tensors, key: torch.full_like(tensors[key], float("nan"))}


def with_config(**config: object) -> Callable[[Path], object]:
    """Write the adapter as PEFT does, with a config beside it."""

    def write(path: Path) -> None:
        tensors = load_file(path)
        save_file({f"base_model.model.{key.removeprefix('transformer.')}": x for key, x in tensors.items()}, path)
        (path.parent / PEFT_CONFIG).write_text(json.dumps(config))

    return write


def with_factors(rows: int, *, value: float = 1.0, **config: object) -> Callable[[Path], object]:
    """Write LoKr of four layers as PEFT does: two factors with ``rows`` values for a square matrix."""

    def write(path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for number in range(4):
            layer = f"base_model.model.transformer_blocks.{number}.attn.to_q"
            tensors |= {f"{layer}.lokr_w1": torch.full((rows, 1), value), f"{layer}.lokr_w2": torch.ones(1, rows)}
        save_file(tensors, path)
        (path.parent / PEFT_CONFIG).write_text(json.dumps(config))

    return write


BESIDE = r"adapter_config\.json beside the adapter 'ink'"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tensors": (lambda path: path.write_bytes(b"PK no tensors"), "^the adapter 'ink' is no safetensors file"),
    "not whole": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "^the adapter 'ink' is no safetensors file"),
    "not finite": (lambda path: save_file(damaged(load_file(path)), path), "values that are not finite"),
    "gone": (lambda path: path.unlink(), "'ink' was deleted, or a rank cannot see the data directory"),
    "a pattern": (
        lambda path: (path.parent / PEFT_CONFIG).write_text(json.dumps({"alpha_pattern": {"(a+)+$": 1}})),
        r"patterns that repeat or group something \(\(a\+\)\+\$\)",
    ),
    "a pattern in the header": (
        lambda path: save_file(
            load_file(path),
            path,
            metadata={LORA_ADAPTER_METADATA_KEY: json.dumps({"transformer.alpha_pattern": {"(a+)+$": 1}})},
        ),
        r"patterns that repeat or group something \(\(a\+\)\+\$\)",
    ),
    "groups in a pattern": (
        with_config(alpha_pattern={"(.|.)" * 40 + "!": 1}),
        "patterns that repeat or group something",
    ),
    "no pattern": (with_config(alpha_pattern={"to_q[": 1}), "a pattern in alpha_pattern that is no regular expression"),
    "an endless product": (with_factors(64, value=1e38, r=1, alpha=100), "to_q has a product that is not finite"),
    "no JSON": (lambda path: (path.parent / PEFT_CONFIG).write_text("{"), f"^{BESIDE} is no JSON: "),
    "no config": (
        lambda path: (path.parent / PEFT_CONFIG).write_text("[]"),
        rf"^{BESIDE} has \[\]; it must be",
    ),
    "no number": (with_config(lora_alpha=[1]), rf"^{BESIDE} has lora_alpha \[1\]; it must be a finite number"),
    "an endless alpha": (with_config(lora_alpha=math.inf), f"^{BESIDE} has lora_alpha inf; it must be a finite number"),
    "an endless alpha of a layer": (
        with_config(alpha_pattern={"to_q": math.nan}),
        f"^{BESIDE} has alpha_pattern of 'to_q' nan; it must be a finite number",
    ),
    "no rank": (with_factors(64, r=0, alpha=1), f"^{BESIDE} has r 0; it must be a finite number above 0"),
    "an endless alpha in the header": (
        lambda path: save_file(
            load_file(path), path, metadata={LORA_ADAPTER_METADATA_KEY: '{"transformer.lora_alpha": 1e300}'}
        ),
        r"^the header of the adapter 'ink' has transformer\.lora_alpha 1e\+300; it must be a finite number",
    ),
}
IN_FILE = ("no tensors", "not whole", "not finite", "gone", "an endless product")


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused(kind: str, served: Callable[[str], Served], tmp_path: Path) -> None:
    here = served("qwen")
    ink = Lora(name="ink", folder=folder_of(here.one, tmp_path / "folder"))
    spoil, message = BROKEN[kind]
    spoil(tmp_path / "folder" / LORA_FILE)
    cache = cache_of(here.folder)
    with pytest.raises(AdapterError, match=message) as refusal:
        cache.load(ink)
    assert str(tmp_path) not in str(refusal.value), "clients need not know where files are"
    assert refusal.value.field == ("file" if kind in IN_FILE or kind.endswith("in the header") else "config")
    assert list(cache) == []


def test_factors_are_multiplied_within_the_memory_of_adapters(served: Callable[[str], Served], tmp_path: Path) -> None:
    """Otherwise a small file could use all memory of a rank before layer sizes are compared."""
    here = served("qwen")
    ink = Lora(name="ink", folder=folder_of(here.one, tmp_path / "folder"))
    with_factors(1024, r=1, alpha=1)(tmp_path / "folder" / LORA_FILE)
    message = r"products of more than 0\.01 GiB, the model's runtime_loras\.memory_gib"
    with pytest.raises(ValueError, match=message):  # the second of 8 MiB each
        cache_of(here.folder, memory_gib=0.01).load(ink)


def test_another_models_file_and_a_part_that_is_not_there(served: Callable[[str], Served], tmp_path: Path) -> None:
    wan, cache = folder_of(served("wan").one, tmp_path / "wan"), cache_of(served("qwen").folder)
    with pytest.raises(ValueError, match="the adapter 'ink' is for another model"):
        cache.load(Lora(name="ink", folder=wan))
    with pytest.raises(AdapterError, match="part 'unet': the model has transformer") as refusal:
        cache.load(Lora(name="ink", folder=wan, part="unet"))
    assert refusal.value.field == "part"
