"""Compiled encoders and decoders give the same values, for prepared calls only."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from engines.core.torch_private import tree_map_only
from pipelines.blocks import compilation, decoder, encoder
from pipelines.blocks.captured import CapturedForward, masks_as_traced
from pipelines.blocks.compilation import CompiledForward, compile_calls
from pipelines.checkpoint import Checkpoint
from pipelines.vae import multi_gpu
from pipelines.vae.fused import FusedGroupNorm, fuse_decoder
from pipelines.vae.strips import decode_in_bands
from tests.pipelines.support.checkpoints import tiny, tiny_hunyuan, tiny_ltx, tiny_others, tiny_pictures, tiny_qwen
from tests.pipelines.support.pretend_gpu import GPU, PretendGpu, put_on_gpu

ENCODERS = (
    *(tiny.flux, tiny.wan, tiny_hunyuan.hunyuan_video, tiny_ltx.ltx2, tiny_others.sd3, tiny_others.krea2),
    *(tiny_pictures.flux2_dev, tiny_pictures.flux2_klein, tiny_pictures.z_image, tiny_qwen.qwen, tiny_qwen.qwen21),
)
"""Families with each kind of text encoder."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets "traced" for each compiled graph and "run" for each run, without a compiler."""
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
    """Fused attention refuses a bias whose neighbouring keys are not contiguous."""
    checkpoint = Checkpoint(tiny_flux)
    encoders = [checkpoint.text_encoder(compiled=compiled)._pipeline.text_encoder_2 for compiled in (False, True)]
    biases = [encoder.encoder.block[0].layer[0].SelfAttention.compute_bias(8, 8) for encoder in encoders]
    assert [bias.stride(-1) == 1 for bias in biases] == [False, True]
    torch.testing.assert_close(biases[1], biases[0], rtol=0, atol=0)


@pytest.mark.parametrize("parts", ["text_encoder", "decoder"])
def test_kernels_are_chosen_alike_in_a_process_that_replaces_another(
    tiny_flux: Path, graphs: list[str], parts: str
) -> None:
    """Inductor does not store its choice of scaled-down blocks, and would time them in each process."""
    with inductor_config.patch(dynamic_scale_rblock=True):
        getattr(Checkpoint(tiny_flux), parts)(compiled=True)
        assert not inductor_config.dynamic_scale_rblock


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


@torch.no_grad()
def test_a_fused_decoder_gives_the_same(tiny_flux: Path) -> None:
    """Fusing is for CUDA; here its norms compute as specified, in channels-last memory."""
    decoder: Any = Checkpoint(tiny_flux).decoder()._pipeline.vae.decoder
    before = [name for name, part in decoder.named_modules() if isinstance(part, nn.GroupNorm)]
    fused = fuse_decoder(decoder)
    latents_BCHW = torch.randn(2, decoder.conv_in.in_channels, 6, 5)
    torch.testing.assert_close(fused(latents_BCHW), decoder(latents_BCHW), rtol=1e-4, atol=1e-5)
    assert fused.conv_out.weight.is_contiguous(memory_format=torch.channels_last)
    assert sum(isinstance(part, FusedGroupNorm) for part in fused.modules()) == len(before) - 1, "not attention"
    assert before == [name for name, part in decoder.named_modules() if isinstance(part, nn.GroupNorm)]


@torch.no_grad()
def test_a_fused_decoder_decodes_every_size(tiny_flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture's bytes do not depend on the sizes that were prepared."""
    vae: Any = Checkpoint(tiny_flux).decoder()._pipeline.vae
    fused = fuse_decoder(vae.decoder)
    monkeypatch.setattr(compilation, "fuse_decoder", lambda _: fused)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    (forward,) = compilation.compile_decoder(vae)
    monkeypatch.undo()
    first, other = (torch.randn(1, vae.decoder.conv_in.in_channels, 4, width) for width in (4, 6))
    with compile_calls([forward]):
        vae.decoder(first)
    for latents_BCHW in (first, other):
        assert forward.is_ready(latents_BCHW)
        assert torch.equal(vae.decoder(latents_BCHW), fused(latents_BCHW))


@torch.no_grad()
def test_a_copy_for_another_device_runs_its_own_forward(tiny_flux: Path) -> None:
    """A fused decoder has weights of its own, and the other devices need no copy of those."""
    decoder: Any = Checkpoint(tiny_flux).decoder()._pipeline.vae.decoder
    latents_BCHW = torch.randn(1, decoder.conv_in.in_channels, 4, 4)
    expected = decoder(latents_BCHW)
    fused = fuse_decoder(decoder)
    forward = decoder.__dict__["forward"] = CompiledForward(decoder.forward, fused.forward)
    with compile_calls([forward]):
        decoder(latents_BCHW)
    memo: dict[int, Any] = {}
    other = copy.deepcopy(decoder, memo)
    assert id(decoder.conv_in) in memo
    assert id(fused.conv_in) not in memo
    other.conv_out.weight.zero_()
    assert torch.equal(other(latents_BCHW), other.conv_out.bias[None, :, None, None].expand_as(expected))
    torch.testing.assert_close(decoder(latents_BCHW), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", [tiny.flux, tiny.wan, tiny_pictures.flux2_dev, tiny_qwen.qwen])
def test_encoders_can_be_recorded(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """No kind of text encoder reads a value back or copies from the host."""
    checkpoint, calls = Checkpoint(make(tmp_path)), list[tuple[nn.Module, Any, Any]]()
    encoder = checkpoint.text_encoder()
    parts = {name: part for name, part in vars(encoder._pipeline).items() if name.startswith("text_encoder")}
    for module in (part for part in parts.values() if isinstance(part, nn.Module)):
        compilation.make_bias_contiguous(module)
        module.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    encoder.encode(checkpoint.defaults.request(prompt="a circle"))
    for module, args, options in list(calls):
        with PretendGpu() as gpu:
            put_on_gpu(module)
            args, options = tree_map_only(Tensor, lambda x: x.to(GPU), (args, options))
            with masks_as_traced(), gpu.recording():
                module.forward(*args, **options)
        assert gpu.found == []
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("make", ENCODERS)
def test_encoders_are_captured_on_a_gpu(
    make: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replays read later prompts of the same length, and several encoders share one pool."""
    checkpoint = Checkpoint(make(tmp_path), "cuda", torch.float32)
    with patch("transformers.Qwen3VLProcessor.from_pretrained", lambda *_, **__: tiny_qwen.Qwen3Processor()):
        plain, quick = checkpoint.text_encoder(), checkpoint.text_encoder(compiled=True)
    requests = [checkpoint.defaults.request(prompt=prompt) for prompt in ("a circle", "a square", "a circle")]
    with quick.compile_calls():
        quick.encode(requests[0])
    assert not [record for record in caplog.records if record.name.startswith("pipelines.")]
    forwards: list[Any] = [part._compiled for part in quick._compiled]
    assert any(call is not None for forward in forwards for call in forward._calls.values())
    for request in requests:
        values, expected = (
            {name: x for name, x in encoder.encode(request).values.items() if isinstance(x, Tensor)}
            for encoder in (quick, plain)
        )
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoders_are_fused_on_a_gpu(tiny_flux: Path, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint(tiny_flux, "cuda", dtype)
    request = checkpoint.defaults.request(width=64, height=96)
    plain, quick = checkpoint.decoder(), checkpoint.decoder(compiled=True)
    norm = patch.object(FusedGroupNorm, "forward", autospec=True, side_effect=FusedGroupNorm.forward)
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # in TF32 each layout rounds differently
    with exact, quick.compile_calls(), norm as forward:
        pixels = quick.pixels(checkpoint.first_latents(request))
        expected = plain.pixels(checkpoint.first_latents(request))
    assert forward.called
    difference = (pixels.float() - expected.float()).abs()
    assert difference.mean() < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [tiny.flux, tiny_pictures.flux2_klein, tiny_pictures.z_image])
def test_bytes_do_not_depend_on_what_was_prepared(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint, found = Checkpoint(make(tmp_path), "cuda", torch.bfloat16), []
    request = checkpoint.defaults.request(width=64, height=96, prompt="a circle")
    latents = checkpoint.first_latents(request)
    for prepares in (True, False):
        words, pixels = checkpoint.text_encoder(compiled=True), checkpoint.decoder(compiled=True)
        if prepares:
            with words.compile_calls(), pixels.compile_calls():
                words.encode(request)
                pixels.pixels(latents)
        found.append((words.encode(request).values, pixels.pixels(latents)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.gpu
def test_what_reads_values_runs_uncaptured_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """A failed capture leaves the stream, the allocator and the generator unchanged."""
    device, weight = torch.device("cuda", 0), torch.eye(4, device="cuda")
    reads = CapturedForward(lambda x: x @ weight + x.sum().item(), device)
    reads(torch.ones(4, 4, device=device))
    torch.rand(1, device=device)  # before the next capture
    later = CapturedForward(lambda x: (x @ weight + 1,), device)
    stream, x = torch.cuda.current_stream(), torch.ones(4, 4, device="cuda")
    for number in range(3):
        torch.testing.assert_close(reads(number * x), number * x + 16 * number)
        torch.testing.assert_close(later(number * x), (number * x + 1,))
        assert torch.cuda.current_stream() == stream
        torch.rand(1, device=device)
    assert len(caplog.messages) == 1
    freed = torch.empty(2**28, device=device)
    reserved_bytes = torch.cuda.memory_reserved()
    del freed
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved_bytes - 2**30


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
