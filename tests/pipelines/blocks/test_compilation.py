"""Compiled encoders and decoders: the same values, and only for what was prepared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from pipelines.blocks import compilation, decoder, encoder
from pipelines.blocks.compilation import CompiledForward, compile_calls
from pipelines.checkpoint import Checkpoint
from pipelines.vae import multi_gpu
from pipelines.vae.strips import decode_in_bands


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by "traced" with each graph that is compiled, and by "run" with each that runs; no compiler is at work."""
    seen: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append("traced")

        def run(*args: Any) -> Any:
            seen.append("run")
            return graph(*args)

        return run

    torch._dynamo.reset()
    for module, name in ((encoder, "compile_encoders"), (decoder, "compile_decoder")):
        monkeypatch.setattr(module, name, partial(getattr(compilation, name), backend=backend))
    return seen


def test_prompts_are_compiled_for_once_and_mean_the_same(tiny_flux: Path, graphs: list[str]) -> None:
    checkpoint = Checkpoint(tiny_flux)
    plain, quick = checkpoint.text_encoder(), checkpoint.text_encoder(compiled=True)
    requests = [checkpoint.defaults.request(prompt=prompt) for prompt in ("a circle", "two squares")]
    guided = replace(requests[0], true_cfg_scale=2.0, negative_prompt="three stars")
    with quick.compile_calls():
        quick.encode(requests[0])
    assert graphs == ["traced", "run"] * 2, "one graph each of two encoders, without a break"
    for request in (*requests, guided):
        ours, expected = quick.encode(request), plain.encode(request)
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-5, atol=1e-5)
        assert (ours.negative is None) == (expected.negative is None)
        torch.testing.assert_close(ours.negative or {}, expected.negative or {}, rtol=1e-5, atol=1e-5)
    assert graphs[4:] == ["run"] * 8


@torch.no_grad()
def test_t5_adds_to_its_scores_what_fused_attention_takes(tiny_flux: Path, graphs: list[str]) -> None:
    """It refuses a bias of which neighbouring keys do not lie side by side."""
    checkpoint = Checkpoint(tiny_flux)
    encoders = [checkpoint.text_encoder(compiled=compiled)._pipeline.text_encoder_2 for compiled in (False, True)]
    biases = [encoder.encoder.block[0].layer[0].SelfAttention.compute_bias(8, 8) for encoder in encoders]
    assert [bias.stride(-1) == 1 for bias in biases] == [False, True]
    torch.testing.assert_close(biases[1], biases[0], rtol=0, atol=0)


@pytest.mark.parametrize("parts", ["text_encoder", "decoder"])
def test_kernels_are_chosen_alike_in_a_process_that_replaces_another(
    tiny_flux: Path, graphs: list[str], parts: str
) -> None:
    """Inductor does not find its choice of scaled-down blocks again, and times them anew in each process."""
    with inductor_config.patch(dynamic_scale_rblock=True):
        getattr(Checkpoint(tiny_flux), parts)(compiled=True)
        assert not inductor_config.dynamic_scale_rblock


def test_results_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's own memory is written again by its next call."""
    memory = torch.zeros(2)
    run = compilation._copy_results(lambda x: {"x": memory.copy_(x)})
    first = run(torch.ones(2))
    run(torch.zeros(2))
    assert first["x"].tolist() == [1, 1]


def test_other_sizes_are_decoded_as_they_are_written(tiny_flux: Path, graphs: list[str]) -> None:
    checkpoint = Checkpoint(tiny_flux)
    expected, other = (checkpoint.defaults.request(width=width, height=64) for width in (64, 96))
    plain, quick = checkpoint.decoder(), checkpoint.decoder(compiled=True)
    with quick.compile_calls():
        quick.decode_all(checkpoint.first_latents(expected), expected)
    for request, run in ((other, []), (expected, ["run"])):
        graphs.clear()
        latents = checkpoint.first_latents(request)
        np.testing.assert_allclose(quick.decode(latents, request), plain.decode(latents, request), atol=1)
        assert graphs == run


def test_several_devices_leave_what_is_compiled_to_the_first(
    tiny_flux: Path, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_gpu, "MIN_BAND_ROWS", 2)
    counts: list[int] = []

    def in_bands(decoders: Sequence[Any], *args: Any) -> Tensor:
        counts.append(len(decoders))
        return decode_in_bands(decoders, *args)

    monkeypatch.setattr(multi_gpu, "decode_in_bands", in_bands)
    checkpoint = Checkpoint(tiny_flux)
    expected, other = (checkpoint.defaults.request(width=width, height=64) for width in (64, 96))
    plain, quick = checkpoint.decoder(), checkpoint.decoder(compiled=True, memory_bytes=2**30, others=("cpu",))
    with quick.compile_calls():
        quick.decode_all(checkpoint.first_latents(expected), expected)
    for request, seen, num_devices in ((other, [], [2]), (expected, ["run"], [])):
        graphs.clear()
        counts.clear()
        latents = checkpoint.first_latents(request)
        np.testing.assert_allclose(quick.decode(latents, request), plain.decode(latents, request), atol=1)
        assert (graphs, counts) == (seen, num_devices)


def test_calls_are_told_apart_by_form_and_not_by_value() -> None:
    calls: list[str] = []
    part = CompiledForward(lambda x, *, flag: calls.append("plain"), lambda x, *, flag: calls.append("compiled"))
    with compile_calls([part]):
        part(torch.zeros(1, 2), flag=False)
    part(torch.ones(1, 2), flag=False)
    part(torch.ones(1, 3), flag=False)
    part(torch.ones(1, 2, dtype=torch.int64), flag=False)
    part(torch.ones(1, 2), flag=True)
    assert calls == ["compiled", "compiled", "plain", "plain", "plain"]
    assert list(inspect.signature(part).parameters) == ["x", "flag"]


@pytest.mark.slow
def test_inductor_gives_the_same_at_every_start(tiny_flux: Path) -> None:
    checkpoint, pictures = Checkpoint(tiny_flux), []
    request = checkpoint.defaults.request(width=64, height=64, prompt="a circle")
    latents = checkpoint.first_latents(request)
    for _ in range(2):
        torch._dynamo.reset()
        words, pixels = checkpoint.text_encoder(compiled=True), checkpoint.decoder(compiled=True)
        with words.compile_calls(), pixels.compile_calls():
            pictures.append((words.encode(request).values, pixels.pixels(latents)))
    torch.testing.assert_close(pictures[0], pictures[1], rtol=0, atol=0)
    plain = (checkpoint.text_encoder().encode(request).values, checkpoint.decoder().pixels(latents))
    torch.testing.assert_close(pictures[0], plain, rtol=1e-3, atol=1e-4)
