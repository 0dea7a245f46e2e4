"""Prompts of several lengths are steps of few shapes if the model pads them, and give its own pictures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.parallel.division import shape_of
from engines.torch_engine import engine as engine_module
from engines.torch_engine.compiler import compile_blocks, static_shapes
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.blank import first_step
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.models.hunyuan_video import spec as hunyuan_video
from pipelines.models.krea2 import spec as krea2
from pipelines.models.z_image.spec import SPEC
from pipelines.request import MediaRequest
from pipelines.run import PlainEngine, load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE, Case, denoised, encoded, request_of
from tests.pipelines.support.checkpoints import (
    tiny_cosmos,
    tiny_flux3,
    tiny_hunyuan,
    tiny_minimax,
    tiny_models,
    tiny_others,
    tiny_qwen,
)
from tests.pipelines.support.references.own_call import own_latents

WINDOW = 32
MOST = WINDOW - 1
"""Letters in one window: a token each, and one end token."""
CASE = Case(make=tiny_models.z_image, changes={"true_cfg_scale": 3.0})


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def latents_of(folder: Path, num_letters: int, *, fast: bool | None) -> Tensor:
    checkpoint = Checkpoint(folder)
    pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses", fast=fast))
    *_, last = pipeline.states(replace(request_of(CASE, folder), prompt="a" * num_letters))
    latents: Tensor = pipeline.sampler.latents(last)["latents"]
    return latents


@pytest.mark.parametrize("num_letters", [5, MOST, MOST + 1])
@pytest.mark.parametrize("fast", [False, True], ids=["module", "hand-ordered"])
def test_latents_equal_the_pipelines_own(folder: Path, num_letters: int, fast: bool) -> None:
    expected = own_latents(folder, replace(request_of(CASE, folder), prompt="a" * num_letters))
    assert relative_difference(latents_of(folder, num_letters, fast=fast), expected) <= TOLERANCE


@pytest.mark.parametrize("fast", [False, True], ids=["module", "hand-ordered"])
def test_what_fills_a_prompt_up_is_what_the_model_fills_it_up_with(folder: Path, fast: bool) -> None:
    """The embedder's own output for padding gives another picture."""
    expected = own_latents(folder, replace(request_of(CASE, folder), prompt="a" * 5))
    nothing = patch("pipelines.models.z_image.text.padding_mask", none_filled)
    with nothing, patch("pipelines.models.z_image.fast.padding_mask", none_filled):
        assert relative_difference(latents_of(folder, 5, fast=fast), expected) > 10 * TOLERANCE


def none_filled(text_TD: Tensor) -> Tensor:
    return torch.zeros_like(text_TD[:, 0], dtype=torch.bool)


def test_prompts_within_a_window_have_steps_of_one_shape(folder: Path) -> None:
    sampler, encoder = Checkpoint(folder).sampler(), Checkpoint(folder).text_encoder()

    def shape(num_letters: int) -> Any:
        request = replace(request_of(CASE, folder), prompt="a" * num_letters)
        return shape_of(sampler.branches(sampler.begin(request, encoder.encode(request)))[0])

    assert shape(1) == shape(20) == shape(MOST) != shape(MOST + 1)


def test_a_gang_prepares_a_short_prompt_beside_the_longest(folder: Path) -> None:
    checkpoint, size = Checkpoint(folder), Size(width=48, height=32)
    longest, short = (branches[0].inputs["cap_feats.0"] for branches in checkpoint.first_steps([size], ["transformer"]))
    assert longest.shape[0] > short.shape[0] == 2 * WINDOW


def test_it_is_done_once_a_job(folder: Path) -> None:
    """Engines recognise the text from step to step."""
    pipeline = load_pipeline(Checkpoint(folder))
    first, second, *_ = pipeline.states(request_of(CASE, folder))
    texts = [pipeline.sampler.branches(state)[0].inputs["cap_feats.0"] for state in (first, second)]
    assert texts[0] is texts[1]


def test_prompts_alone_are_filled_up() -> None:
    values: Mapping[str, Any] = {"prompt_embeds": [torch.ones(3, 2)], "image_latents": torch.ones(3, 2)}
    filled = SPEC.pad_conditioning(values)
    assert filled["prompt_embeds"][0].shape == (WINDOW, 2)
    assert filled["image_latents"] is values["image_latents"]


PADDED = {
    "krea 2": Case(make=tiny_others.krea2, changes={"negative_prompt": "blue"}),
    "hunyuan": Case(make=tiny_hunyuan.hunyuan_video, num_frames=5, changes={"negative_prompt": "blue"}),
}
"""Models whose pipelines pad each prompt, with two prompts and a letter a token."""
FITTING = {"krea 2": 200, "hunyuan": 400}
"""Lengths that hold "a red circle" with its template, and no longer prompt."""


@contextmanager
def shorter(name: str) -> Iterator[None]:
    """Let short prompts be those of letters."""
    prompt = patch.dict(hunyuan_video.SHORT_TEXT, {("prompt_embeds", "prompt_embeds_mask"): FITTING[name]})
    with patch.object(krea2, "SHORT_PROMPT", FITTING[name]), prompt:
        yield


def shapes_and_latents(
    name: str, folder: Path, request: MediaRequest, strategy: str, conditioning: bytes
) -> tuple[list[int], Tensor]:
    with shorter(name):
        sampler = Checkpoint(folder).sampler()
        branches = sampler.branches(sampler.begin(request, pickle.loads(conditioning)))
        texts = [x.shape[1] for x_name, x in branches[1].inputs.items() if x_name.startswith("encoder_hidden_states")]
        return texts, denoised(folder, request, strategy, conditioning)


@pytest.mark.parametrize(
    ("name", "strategy", "num_letters", "lengths"),
    [
        ("krea 2", "ulysses", 12, [FITTING["krea 2"]]),
        ("krea 2", "ring", 40, [541]),
        ("hunyuan", "ring", 12, [FITTING["hunyuan"], 0]),
        ("hunyuan", "tensor", 40, [1000, 256]),
    ],
)
def test_steps_of_short_prompts_have_less_padding(
    name: str, strategy: str, num_letters: int, lengths: list[int], folders: Callable[[Any], Path]
) -> None:
    folder = folders(PADDED[name].make)
    request = replace(request_of(PADDED[name], folder), prompt="a" * num_letters)
    expected = own_latents(folder, request)
    for texts, latents in gang(2).run(shapes_and_latents, name, folder, request, strategy, encoded(folder, request)):
        assert texts == lengths
        assert relative_difference(latents, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "lengths"), [("krea 2", [[512], [128], [22]]), ("hunyuan", [[1000, 256], [256, 0], [256, 0]])]
)
def test_a_gang_prepares_both_lengths(name: str, lengths: list[list[int]], folders: Callable[[Any], Path]) -> None:
    """The self-check has a short prompt."""
    checkpoint = Checkpoint(folders(PADDED[name].make))
    steps = (*checkpoint.first_steps([Size(width=48, height=32)], ["transformer"]), checkpoint.denoiser().probe())
    texts = [[x.shape[1] for key, x in step[0].inputs.items() if key.startswith("encoder_hidden")] for step in steps]
    assert texts == lengths


VARYING = {
    "ernie": Case(make=tiny_others.ernie_image),
    "cosmos": Case(make=tiny_cosmos.cosmos, num_frames=5),
    "ideogram": Case(make=tiny_others.ideogram4),
    "qwen": Case(make=tiny_models.qwen_image),
    "qwen 2.1": Case(make=tiny_qwen.qwen21),
    "flux 3": Case(make=tiny_flux3.flux3),
    "minimax": Case(make=tiny_minimax.minimax_h3, num_frames=124),
}
KINDS = {("qwen 2.1", 1): 2, ("qwen 2.1", 2): 2, ("flux 3", 1): 2, ("flux 3", 2): 3}
"""Kinds of blocks, by their calls and kernels too, where there are several: by model and number of ranks."""
QUICK = (("ernie", 1), ("ernie", 2), ("cosmos", 2))


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"),
    [
        pytest.param(name, num, strategy, marks=[] if (name, num) in QUICK and strategy != "ring" else pytest.mark.slow)
        for name in VARYING
        for num, strategy in ((1, "ulysses"), (2, "ulysses"), (2, "allgather_kv"), (2, "ring"))
    ],
)
def test_prompts_of_all_lengths_share_compiled_blocks(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path]
) -> None:
    """Other sizes do, too. A gang's self-check has blocks of its own. Tokens are even and uneven over two ranks."""
    case, folder = VARYING[name], folders(VARYING[name].make)
    for num_of_check, num_graphs in gang(num_ranks).run(graphs_of_lengths, case, folder, strategy):
        assert [num - num_of_check for num in num_graphs] == [KINDS.get((name, num_ranks), 1)] * 3


def graphs_of_lengths(case: Case, folder: Path, strategy: str) -> tuple[int, list[int]]:
    """Return the compiled graphs after a self-check, and after steps of three lengths, which are right."""
    checkpoint, ranks = Checkpoint(folder), tuple(range(dist.get_world_size()))
    opened = OpenedPipeline(checkpoint.path, torch.device("cpu"), torch.float32)
    plain = PlainEngine(model=checkpoint.denoiser())
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with patch.object(engine_module, "compile_blocks", partial(compile_blocks, backend="eager")):
        engine = TorchEngine(checkpoint.denoiser(), strategy=strategy, fast=False, compiled=True)
        with static_shapes():
            engine.predict(checkpoint.denoiser().probe()[:1], ranks)
        num_of_check, shapes, graphs = counters["stats"]["unique_graphs"], set(), list[int]()
        for num_tokens, sides in ((3, (3, 5)), (40, (3, 5)), (9, (4, 6))):
            request = request_of(replace(case, sides=sides), checkpoint.path)
            (branch, *_) = first_step(opened, request, num_tokens, torch.Generator().manual_seed(num_tokens))
            (answer,), (expected,) = engine.predict((branch,), ranks), plain.predict((branch,), (0,))
            assert relative_difference(answer, expected) <= TOLERANCE
            shapes.add(str(shape_of(branch)))
            graphs.append(counters["stats"]["unique_graphs"])
        engine.close()
    assert len(shapes) == 3
    return num_of_check, graphs
