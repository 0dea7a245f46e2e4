"""The builder module against the real TensorRT."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from engines.tensorrt_engine.build import builder as builder_module
from engines.tensorrt_engine.build.bindings import Target, load_bindings
from engines.tensorrt_engine.build.builder import BuildError, BuildOptions, Profile, build
from engines.tensorrt_engine.build.progress import BuildCancelledError, ProgressBar, spinner
from tests.engines.tensorrt_engine.support.one_layer import attention_network, collective, collective_network

SM89 = Target.parse("sm89")


def test_bindings_name_product_and_version() -> None:
    bindings = load_bindings()
    assert bindings.product in ("tensorrt", "tensorrt_rtx")
    assert bindings.version[0].isdigit()


def test_progress_reports_every_phase_to_its_end() -> None:
    started, finished = [], []

    class Recording(ProgressBar):
        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            started.append(phase)
            super().phase_start(phase, parent, num_steps)

        def phase_finish(self, phase: str) -> None:
            finished.append(phase)
            super().phase_finish(phase)

    built = build(attention_network("FLOAT16"), BuildOptions(target=SM89), bar=Recording(visible=False))
    assert built.engine_file
    assert built.build_s > 0
    assert started
    assert sorted(started) == sorted(finished)


def test_cancelled_from_another_thread() -> None:
    bar = ProgressBar(visible=False)
    thread = threading.Thread(target=bar.cancelled.set)
    thread.start()
    thread.join()
    with pytest.raises(BuildCancelledError):
        build(attention_network("FLOAT16"), BuildOptions(target=SM89), bar=bar)


def test_interrupt_ends_the_build_and_gives_the_handler_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    class Interrupting(ProgressBar):
        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    options = BuildOptions(target=SM89, timing_cache_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        build(attention_network("FLOAT16"), options, bar=Interrupting(visible=False))
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_a_finalizer_loses_ends_the_export() -> None:
    """Python prints "Exception ignored in" and goes on."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), spinner("exporting", visible=False):
        [Finalized()].clear()
    assert signal.getsignal(signal.SIGINT) is before


def test_timing_cache_is_kept_and_taken_up_again(tmp_path: Path) -> None:
    options = BuildOptions(target=SM89, timing_cache_dir=tmp_path)
    first = build(attention_network("FLOAT16"), options).engine_file
    (stored,) = tmp_path.glob("*.timing")
    assert stored.name == f"{load_bindings().product}-{load_bindings().version}-sm89.timing"
    assert build(attention_network("FLOAT16"), options).engine_file == first


def test_parse_error_carries_tensorrts_words() -> None:
    with pytest.raises(BuildError, match="cannot parse"):
        build(b"no ONNX at all", BuildOptions(target=SM89))


@pytest.mark.skipif(not hasattr(load_bindings().api, "ComputeCapability"), reason="this product does not cross-compile")
def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"sm120.*not for sm90"):
        build(collective_network(collective("all_gather"), "FLOAT16"), BuildOptions(target=Target.parse("sm90")))


def test_tensorrt_proper_builds_for_the_gpu_present_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="none here"):
        builder_module._require_this_gpu(SM89)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match="this is sm90, not sm89"):
        builder_module._require_this_gpu(SM89)
    builder_module._require_this_gpu(Target.parse("sm90"))


@pytest.mark.parametrize(("text", "name"), [("sm89", "sm89"), ("SM120", "sm120"), ("9.0", "sm90"), ("12.0", "sm120")])
def test_target_is_read(text: str, name: str) -> None:
    assert Target.parse(text).name == name


@pytest.mark.parametrize("text", ["h100", "", "sm", "sm75", "sm12000"])
def test_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"compute capability"):
        Target.parse(text)


def test_profile_of_an_unknown_input_is_an_error() -> None:
    shape = (1, 4, 256, 64)
    profile = Profile(shapes={"nobody": (shape, shape, shape)})
    with pytest.raises(ValueError, match="names nobody; the inputs with dynamic dims are none"):
        build(attention_network("FLOAT16"), BuildOptions(target=SM89, profiles=(profile,)))
