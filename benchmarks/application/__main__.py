"""A published model at full size (random weights) behind ``troupe serve``: pictures, edits, many at once, a kill.

    python -m benchmarks.application [MODEL] [--config gpu2] [--folder FOLDER] [--side 1024] [--out FILE]

``--config`` is a shipped configuration, whose model is replaced. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from PIL import Image

from benchmarks.application.memory import peak_memory
from benchmarks.models.folders import write_folder
from benchmarks.serving.application import Application, serving
from benchmarks.serving.clients import stages_ms
from benchmarks.spread import Spread
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig

IMAGES, EDITS = "/v1/images/generations", "/v1/images/edits"
PROMPT = "a small red circle above a large blue square on a white background"
TIMEOUT_S = 300.0
NUM_REPEATS, NUM_LARGE, NUM_AT_ONCE = 5, 3, 8
PARTS = ("total", "queue", "encode", "denoise", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="FLUX.2-klein-4B")
    parser.add_argument("--config", default="gpu2")
    parser.add_argument("--folder", type=Path, help="where the model is, or is written to if nothing is there")
    parser.add_argument("--side", type=int, default=1024, help="of most pictures, in pixels")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = arguments.folder or Path(name) / arguments.model
        written_s = time.perf_counter()
        if not folder.exists():
            write_folder(arguments.model, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        document: dict[str, Any] = {"model": arguments.model, "config": arguments.config}
        document["written_s"] = round(time.perf_counter() - written_s, 1)
        torch.cuda.empty_cache()
        try:
            with serving(config_for(arguments.config, folder)) as application:
                for part in measurements(application, arguments.side):
                    document |= part
                    print(json.dumps(part), flush=True)
                ending_s = time.perf_counter()
            document["end_s"] = round(time.perf_counter() - ending_s, 1)
        finally:
            text = json.dumps(document)
            if arguments.out:
                arguments.out.write_text(text)
            print(text, flush=True)


def config_for(name: str, folder: Path) -> ServeConfig:
    """The shipped configuration ``name`` with the model in ``folder`` in place of its first one, which stays alone."""
    document = load_config(name).model_dump(mode="json")
    application = document["applications"][0]
    first = application["args"]["models"][0]
    application["args"]["models"] = [{**first, "name": "full", "path": str(folder)}]
    return parse_config(document)


def measurements(application: Application, side: int) -> Any:
    yield {"ready_s": round(application.ready_s, 1)}
    with Client(base_url=application.url, timeout=TIMEOUT_S) as client:
        client.side = side
        defaults = client.get("/v1/models").json()["data"][0]["defaults"]
        yield {"steps": defaults["num_inference_steps"], "first": timing(painted(client))}
        pictures = [painted(client) for _ in range(NUM_REPEATS)]
        reference = data_of(pictures[0])
        yield {"picture": medians([timing(one) for one in pictures])}  # the encoder kept what it made of the prompt
        others = [painted(client, prompt=f"{PROMPT}, number {number}") for number in range(NUM_REPEATS)]
        yield {"new_prompt": medians([timing(one) for one in others])}
        yield {"same_bytes": all(data_of(one) == reference for one in pictures)}
        yield {"jpeg": medians([timing(painted(client, output_format="jpeg")) for _ in range(NUM_REPEATS)])}
        small = [painted(client, size=f"{side // 2}x{side // 2}") for _ in range(NUM_REPEATS)]
        yield {"half_side": medians([timing(one) for one in small[1:]])}
        with peak_memory() as peak:
            large = [painted(client, size=f"{2 * side}x{2 * side}") for _ in range(NUM_LARGE)]
        yield {"double_side": medians([timing(one) for one in large[1:]]), "gpu_gib": peak.rounded()}
        if defaults.get("max_pictures"):
            yield {"edit": medians([timing(edited(client)) for _ in range(NUM_REPEATS)][1:])}
        yield at_once(client)
        yield after_a_kill(client, application, reference)


class Client(httpx.Client):
    """Asks for square pictures of ``side`` pixels."""

    side: int

    @property
    def size(self) -> str:
        return f"{self.side}x{self.side}"


def painted(client: Client, **fields: Any) -> httpx.Response:
    answer = client.post(IMAGES, json={"prompt": PROMPT, "seed": 1, "size": client.size, **fields})
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def edited(client: Client) -> httpx.Response:
    """A picture of the same size comes along."""
    file = io.BytesIO()
    Image.effect_noise((client.side, client.side), 60).convert("RGB").save(file, "PNG")
    answer = client.post(
        EDITS,
        data={"prompt": PROMPT, "seed": "1", "size": client.size},
        files={"image": ("noise.png", file.getvalue(), "image/png")},
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def data_of(answer: httpx.Response) -> bytes:
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def timing(answer: httpx.Response) -> dict[str, float]:
    """Milliseconds by the answer's own ``Server-Timing``."""
    return stages_ms(answer.headers["server-timing"])


def medians(timings: list[dict[str, float]]) -> Mapping[str, Any]:
    return {part: Spread.of([one[part] for one in timings]).rounded(1) for part in PARTS}


def at_once(client: Client) -> dict[str, Any]:
    """``NUM_AT_ONCE`` pictures that come together."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        start_s = time.perf_counter()
        answers = list(pool.map(lambda seed: painted(client, seed=seed), range(NUM_AT_ONCE)))
        took_s = time.perf_counter() - start_s
    waits = [timing(answer)["total"] for answer in answers]
    return {"at_once": {"per_s": round(NUM_AT_ONCE / took_s, 3), "total_ms": Spread.of(waits).rounded(0)}}


def after_a_kill(client: Client, application: Application, expected: bytes) -> dict[str, Any]:
    """``kill -9`` of a rank, and a picture at once."""
    ranks = [one for one in application.processes() if title(one).startswith("ray::Rank")]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    start_s = time.perf_counter()
    answer = painted(client)
    took_s = time.perf_counter() - start_s
    return {"after_a_kill": {"answered_s": round(took_s, 1), "same_bytes": data_of(answer) == expected}}


def title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


if __name__ == "__main__":
    main()
