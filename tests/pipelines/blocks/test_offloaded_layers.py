"""Text encoders with their layers in host memory give the same bytes as transformers' own forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from engines.core.torch_private import tree_leaves
from engines.core.weight_memory import WeightMemory
from engines.parallel.offload import NUM_BUFFERS
from pipelines.blocks import footprint, opened
from pipelines.blocks.encoder import BlocksEncoder, Conditioning
from pipelines.blocks.offloaded_layers import LayerBytes, layer_lists, layer_weights, num_bytes, text_encoders_of
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPicture, InputPictures
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny, tiny_others, tiny_pictures, tiny_qwen
from tests.pipelines.support.checkpoints.parts import shake
from tests.pipelines.support.references.picture_cases import small_pictures

NUM_LAYERS = 4
DEPTHS = ("num_hidden_layers", "num_layers", "depth")
MODELS: dict[str, Callable[[Path], Path]] = {
    "CLIP and T5": tiny.flux,
    "UMT5": tiny.wan,
    "two CLIPs and T5": tiny_others.sd3,
    "Qwen2.5-VL": tiny_qwen.qwen,
    "Qwen2.5-VL with a picture": tiny_qwen.qwen_edit,
    "Mistral 3": tiny_pictures.flux2_dev,
    "Qwen3": tiny_pictures.flux2_klein,
}


@pytest.fixture(params=MODELS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepened(MODELS[request.param](tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepened(tiny.flux(tmp_path_factory.mktemp("models") / "flux"))


def deepened(folder: Path) -> Path:
    """Give each text encoder in ``folder`` several layers: tiny ones have one or two."""
    for part in folder.glob("text_encoder*"):
        config = json.loads((part / "config.json").read_text())
        deepen(config)
        kind: Any = getattr(transformers, config["architectures"][0])
        for file in part.glob("*.safetensors*"):
            file.unlink()
        encoder: Any = shake(kind(kind.config_class.from_dict(config)))
        encoder.save_pretrained(part)
    return folder


def deepen(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in DEPTHS:
            config[key] = max(value, NUM_LAYERS)
        elif key == "layer_types" and value:
            config[key] = [value[0]] * max(len(value), NUM_LAYERS)
        elif isinstance(value, dict):
            deepen(value)


def encode(encoder: BlocksEncoder, checkpoint: Checkpoint, prompt: str) -> Conditioning:
    defaults = checkpoint.defaults
    num_pictures = defaults.min_pictures
    picture = InputPicture(width=48, height=32, mode="RGB", data=bytes(range(256)) * 18)
    pictures = InputPictures(pictures=(picture,) * num_pictures) if num_pictures else NO_PICTURES
    request = defaults.request(Size(width=64, height=64), prompt=prompt, num_pictures=num_pictures)
    with small_pictures():
        return encoder.encode(request, pictures)


def tensors_of(conditioning: Conditioning) -> list[Tensor]:
    return [x for x in tree_leaves((dict(conditioning.values), conditioning.negative)) if isinstance(x, Tensor)]


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected) > 0
    assert all(map(torch.equal, ours, expected))


def offloaded_lists(encoder: BlocksEncoder) -> list[tuple[nn.Module, ...]]:
    return [layers for one in text_encoders_of(encoder._pipeline).values() for _, layers in layer_lists(one)]


def test_prompts_have_the_same_bytes(folder: Path) -> None:
    """Bytes equal those of transformers' own forward. Layers run from the buffers, and return to the host."""
    checkpoint = Checkpoint(folder)
    with small_pictures():
        plain, offloaded = checkpoint.text_encoder(), checkpoint.text_encoder(offloads_layers=True)
    lists = offloaded_lists(offloaded)
    assert len(lists) == len(offloaded._offloads) >= 1
    hosts = [places(layers) for layers in lists]
    for prompt in ("a red circle", "two blue squares", "a red circle"):
        with layer_storages(lists) as ran:
            ours = tensors_of(encode(offloaded, checkpoint, prompt))
        expected = tensors_of(encode(plain, checkpoint, prompt))
        assert_equal(ours, expected)
        buffers = {buffer_B.untyped_storage().data_ptr() for one in offloaded._offloads for buffer_B in one._buffers}
        assert ran
        assert ran <= buffers
        assert [places(layers) for layers in lists] == hosts


@contextmanager
def layer_storages(lists: list[tuple[nn.Module, ...]]) -> Any:
    """Yield the storages from which layers run inside the block."""
    ran: set[int] = set()
    layers = [layer for one in lists for layer in one]
    handles = [layer.register_forward_pre_hook(lambda own, _: ran.update(places([own]))) for layer in layers]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def places(layers: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for layer in layers for each in layer.parameters()}


def test_only_layers_stay_on_the_host(flux: Path) -> None:
    """The device holds all other weights and two layers of each list, as estimated."""
    checkpoint = Checkpoint(flux)
    offloaded = checkpoint.text_encoder(offloads_layers=True)
    encoders = text_encoders_of(offloaded._pipeline)
    assert sorted(encoders) == ["text_encoder", "text_encoder_2"]
    named = {name: dict(one.named_parameters()) for name, one in encoders.items()}
    moved = sum(named[name][each].nbytes for name, one in encoders.items() for each in layer_weights(one))
    counted = counted_layers(flux)
    layers = [num_bytes(layer) for one in offloaded_lists(offloaded) for layer in one]
    assert counted.layers == counted.prompt == moved == sum(layers)
    largest = [max(map(num_bytes, one)) for one in offloaded_lists(offloaded)]
    assert counted.buffers == NUM_BUFFERS * sum(largest)
    held = sum(one.device_bytes for one in offloaded._offloads)
    assert counted.buffers <= held < 1.2 * counted.buffers


def test_a_sleeping_encoder_has_the_same_bytes_afterwards(flux: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(flux)
    memory = WeightMemory()
    memory.open("cpu", tmp_path)
    with memory.region():
        encoder = checkpoint.text_encoder(offloads_layers=True)
    for module in encoder.modules:
        memory.hold(module)
    memory.before_sleep(encoder.forget_copies)
    expected = tensors_of(encode(encoder, checkpoint, "a red circle"))
    for _ in range(2):
        memory.sleep()
        for offload in encoder._offloads:  # on a GPU they sleep as well
            for buffer_B in offload._buffers:
                buffer_B.zero_()
        memory.wake()
        ours = tensors_of(encode(encoder, checkpoint, "a red circle"))
        assert_equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_bytes_and_holds_two_layers(folder: Path) -> None:
    """Weights other than layers, their buffers and inputs are on the GPU, whichever module reads them."""
    checkpoint = Checkpoint(folder, "cuda", "bfloat16")
    with small_pictures():
        plain, offloaded = checkpoint.text_encoder(), checkpoint.text_encoder(offloads_layers=True)
    layers = [layer for one in offloaded_lists(offloaded) for layer in one]
    assert {each.device.type for layer in layers for each in layer.parameters()} == {"cpu"}
    inside = {id(each) for layer in layers for each in layer.parameters()}
    encoders = text_encoders_of(offloaded._pipeline).values()
    others = [each for one in encoders for each in one.parameters() if id(each) not in inside]
    assert {each.device.type for each in others} == {"cuda"}
    for prompt in ("a red circle", "two blue squares", "a red circle"):
        ours, expected = (tensors_of(encode(one, checkpoint, prompt)) for one in (offloaded, plain))
        assert_equal(ours, expected)


def test_nothing_is_prepared(flux: Path) -> None:
    """A captured call would read one buffer for all layers. Masks and T5's bias are those of captured calls."""
    checkpoint = Checkpoint(flux)
    encoder = checkpoint.text_encoder(compiled=True, offloads_layers=True)
    assert encoder._compiled == ()
    bias = encoder._pipeline.text_encoder_2.encoder.block[0].layer[0].SelfAttention.compute_bias(8, 8)
    assert bias.stride(-1) == 1
    traced: list[bool] = []
    for layers in offloaded_lists(encoder):
        layers[0].register_forward_pre_hook(lambda *_: traced.append(masking_utils.is_tracing(None)))
    encode(encoder, checkpoint, "a red circle")
    assert traced == [True, True]
    assert not masking_utils.is_tracing(None)


def test_what_is_refused(tmp_path: Path, flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"have no lists of layers: remove text_encoder\.offloads_layers"):
        Checkpoint(tiny.flux(tmp_path / "few")).text_encoder(offloads_layers=True)
    for module in (opened, footprint):
        monkeypatch.setattr(module, "quantiser_of", lambda folder: "torchao" if folder.name == "text_encoder_2" else "")
    with pytest.raises(ValueError, match="quantised by torchao, cannot be in host memory"):
        Checkpoint(flux).text_encoder(offloads_layers=True)
    assert counted_layers(flux).layers == 0


def counted_layers(folder: Path) -> LayerBytes:
    request = Checkpoint(folder).defaults.request()
    return Checkpoint(folder, "meta", "float32").footprint(request).layers
