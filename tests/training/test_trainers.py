"""The report's commands run verbatim with today's trainers, each cut to one step, and their exports load."""

import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline

from training import vae
from training.flux_shapes.data import MAIN_SIZE, PictureDataset
from training.wan_shapes.train import REFRESH_EVERY, VideoDataset

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
QUICK = {
    "vae": "--max-steps 1 --batch 1",
    "flux_shapes": "--max-steps 1 --batch 2 --captions 60 --pool 12 --chunk 2",
    "wan_shapes": "--max-steps 1 --batch 1 --captions 60 --pool 2 --chunk 1",
    "kontext_shapes": "--max-steps 1 --batch 2 --captions 60 --pool 12 --chunk 2 --prompts 4 --eval-steps 1",
    "evaluate": "--prompts 1 --steps 1",
    "seeds": "--prompts 1 --seeds 2",
}
WORK = {
    "vae": "train",
    "flux_shapes": "train",
    "wan_shapes": "train",
    "kontext_shapes": "train",
    "evaluate": "evaluate",
    "seeds": "measure",
}


def _program(module: str) -> ModuleType:
    """Return the module that `python -m` runs: a package's `__main__`."""
    imported = import_module(module)
    return import_module(f"{module}.__main__") if hasattr(imported, "__path__") else imported


def _commands() -> list[tuple[str, list[str]]]:
    """Return module and arguments of each training command of the newest report."""
    text = max(REPORTS.glob("shipped-models_*.md")).read_text().replace("\\\n", " ")
    lines = [line.split("python -m ")[1] for line in text.splitlines() if line.startswith("    python -m training.")]
    assert lines, "the newest report has no training command: these tests would run nothing"
    return [(words[0], words[1:]) for words in map(shlex.split, lines)]


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Restore process-wide settings of trainers, since other tests need the earlier ones.

    pytest's patch does not work for the compiler's options: undoing it deletes the option.
    """
    precision = torch.get_float32_matmul_precision()
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    cudnn, limit = torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(sdp)
    torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit = cudnn, limit


@pytest.mark.parametrize("command", _commands(), ids=lambda command: command[0])
def test_a_command_of_the_report_is_understood(command: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = command
    called: list[tuple[Any, ...]] = []

    def work(*args: Any) -> list[Any]:
        called.append(args)
        return []

    monkeypatch.setattr(_program(module), WORK[module.rpartition(".")[2]], work)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    _program(module).main()
    assert len(called) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("torch_as_before")
def test_the_reports_commands_train_export_and_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae, "NUM_MEASURED", 2)
    for module, arguments in _commands():
        here = [word.replace("out/", f"{tmp_path}/") for word in arguments]
        monkeypatch.setattr(sys, "argv", [module, *here, *QUICK[module.rpartition(".")[2]].split()])
        _program(module).main()
    for pipeline, model in ((FluxPipeline, "flux-shapes"), (WanPipeline, "wan-shapes")):
        trained = pipeline.from_pretrained(tmp_path / model, torch_dtype=torch.float32)
        weights = torch.nn.utils.parameters_to_vector(trained.transformer.parameters())
        assert weights.isfinite().all()


def test_long_prompts_come_now_and_then() -> None:
    """Every eighth step has prompts of another length than 48: diffusers' own padding length, and others."""
    data = object.__new__(PictureDataset)
    data.rng, data.steps, data.pools = random.Random(0), 0, MagicMock()
    assert not any(data.next_shown(0.0).is_long for _ in range(40))
    shown = [data.next_shown(1.0) for _ in range(320)]
    assert Counter(one.num_tokens for one in shown) == {48: 280, 512: 20, 128: 10, 256: 10}
    assert {one.size for one in shown if one.is_long} == {MAIN_SIZE}
    assert set(shown) == set(data.kinds)
    videos = object.__new__(VideoDataset)
    videos.steps, videos.pool = 0, MagicMock()
    assert Counter(videos.next_length() for _ in range(320)) == {48: 280, 512: 20, 128: 10, 256: 10}
    assert videos.pool.refresh.call_count == 320 // REFRESH_EVERY
