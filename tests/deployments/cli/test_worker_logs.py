"""The logs of Ray's workers name a model's part that ran out of GPU memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve.schema import ApplicationStatus

from deployments.cli import serving
from deployments.cli.worker_logs import memory_failures, memory_message

SAVER = "[torch_memory_saver.cpp]"
ENDED = f"{SAVER} cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=312"
SURVIVED = f"{SAVER} cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will retry)"
ENCODER = ":job_id:01000000\n:actor_name:ServeReplica:troupe:TextEncoder-FLUX.1-dev\n"
FLUX = "TextEncoder-FLUX.1-dev"
RANK = ":job_id:01000000\n:actor_name:Rank\n"


def failures(logs: Path, *deployments: str, **texts: str) -> list[str]:
    for name, text in texts.items():
        (logs / f"worker-{name}.err").write_text(text)
    return [one.partition(":")[0] for one in memory_failures(logs, deployments)]


def test_the_last_lines_say_why_a_process_ended() -> None:
    assert memory_message(f"loading\n{ENDED}\n") == ENDED
    assert memory_message(f"{SURVIVED}\n" + "a step\n" * 50) == ""
    assert memory_message("a step\n") == ""
    torch_says = "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert memory_message(f'{{"error": "OutOfMemoryError: {torch_says}\\nTraceback"}}\n' + "end\n" * 50) == torch_says


def test_the_part_and_its_model_are_named(tmp_path: Path) -> None:
    assert failures(tmp_path, FLUX, encoder=f"{ENCODER}{ENDED}\n") == [
        "the GPU has no memory left for the text encoder of FLUX.1-dev"
    ]


def test_three_starts_of_one_part_are_one_failure(tmp_path: Path) -> None:
    (said,) = failures(tmp_path, FLUX, a=ENCODER + ENDED, b=ENCODER + ENDED, c=ENCODER + ENDED, other=ENCODER)
    assert "text encoder" in said


def test_a_rank_has_the_model_whose_gang_failed(tmp_path: Path) -> None:
    logs = {"rank": RANK + ENDED}
    one = "the GPU has no memory left for the transformer of "
    assert failures(tmp_path, "Denoiser-wan", "VaeDecoder-flux", **logs) == [f"{one}wan"]
    assert failures(tmp_path, "Denoiser-wan", "Denoiser-flux", **logs) == [f"{one}a model"]


def test_an_actor_that_did_not_fail_is_not_named(tmp_path: Path) -> None:
    """A cluster's logs hold errors of months that processes survived, and those of other applications."""
    other = ":actor_name:ServeReplica:others:Chat\n"
    logs = {"encoder": f"{ENCODER}CUDA out of memory\n", "rank": RANK + ENDED, "other": other + ENDED}
    assert failures(tmp_path, "VaeDecoder-flux", **logs) == []


def test_the_middle_of_a_long_log_is_not_read(tmp_path: Path) -> None:
    filler = "a step\n" * 400_000
    assert len(failures(tmp_path, FLUX, encoder=f"{ENCODER}{filler}{ENDED}\n")) == 1
    assert failures(tmp_path, FLUX, encoder=f"{ENCODER}{filler}CUDA out of memory\n{filler}") == []


def test_a_process_that_had_memory_is_not_named(tmp_path: Path) -> None:
    assert failures(tmp_path, "TextEncoder-FLUX.1-dev", encoder=f"{ENCODER}Traceback: no such file\n") == []


def test_the_error_of_the_start_says_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve reports only a dead actor."""
    (tmp_path / "worker-1.err").write_text(ENCODER + ENDED)
    failed = {"TextEncoder-FLUX.1-dev": SimpleNamespace(message="ActorDiedError()")}
    status = SimpleNamespace(status=ApplicationStatus.DEPLOY_FAILED, deployments=failed)
    monkeypatch.setattr(serving, "application_status", lambda: status)
    monkeypatch.setattr(serving, "log_folder", lambda: tmp_path)
    with pytest.raises(RuntimeError) as error:
        serving._raise_if_failed()
    _, memory, reason = str(error.value).splitlines()
    assert memory.startswith("the GPU has no memory left for the text encoder of FLUX.1-dev: give the model memory_gib")
    assert reason == "TextEncoder-FLUX.1-dev: ActorDiedError()"
    monkeypatch.setattr(serving, "log_folder", lambda: None)
    with pytest.raises(RuntimeError, match=r"^the application cannot start\nTextEncoder"):
        serving._raise_if_failed()
