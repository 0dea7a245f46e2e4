"""Processes that found no GPU memory, by the logs of Ray's workers.

Torch raises an error, which Serve passes on. torch-memory-saver, by which weights sleep, ends the process instead:
Ray reports a dead actor, and the cause is the last line in that worker's log.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from deployments.names import APPLICATION, CODEC, STAGES

TORCH_SAYS = re.compile(r"(?:CUDA|HIP) out of memory[^\n\"\\]{0,400}")
SAVER_SAYS = re.compile(
    r"\[torch_memory_saver\.cpp\][^\n]{0,400}?(?:out of memory|OUT_OF_MEMORY|return OOM)[^\n]{0,400}"
)
LAST_LINES = 20
"""torch-memory-saver also reports what its caller survives: only the end of a log says why the process ended."""
FIRST_BYTES, LAST_BYTES = 2**16, 2**20
"""Read of each log, which may have grown for months: the actor's name, and the end."""
WORKERS = "worker-*.err"
ACTOR = re.compile(r"^:actor_name:(.+)$", re.MULTILINE)
"""Ray writes an actor's name to its log."""
RANK = "Rank"
PARTS: Mapping[str, str] = {
    STAGES["text_encoder"]: "the text encoder",
    STAGES["denoiser"]: "the transformer",
    STAGES["decoder"]: "the decoder",
    CODEC: "the encoder and the decoder",
}
"""Parts of a model by the prefix of their deployment's name."""
REMEDY = "give the model memory_gib, or less of it (docs/operate/cards.md), a smaller size or a larger GPU"


def memory_message(log: str) -> str:
    """Return what a process that found no GPU memory wrote to its ``log``; empty if it found some."""
    if found := TORCH_SAYS.search(log):
        return found[0].strip()
    found = SAVER_SAYS.search("\n".join(log.splitlines()[-LAST_LINES:]))
    return found[0].strip() if found else ""


def memory_failures(logs: Path, deployments: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each part of a model that found no GPU memory. ``deployments`` are those that failed.

    ``logs`` is the folder of a Ray session's logs on this host.
    """
    failed = tuple(deployments)
    seen = {""}
    for file in sorted(logs.glob(WORKERS)):
        with suppress(OSError):
            text = _text_of(file)
            if (message := memory_message(text)) and (part := _part_of(text, failed)) not in seen:
                seen.add(part)
                yield f"the GPU has no memory left for {part}: {REMEDY} ({message})"


def _text_of(file: Path) -> str:
    """Return a log, without the middle of a long one."""
    with file.open("rb") as log:
        first = log.read(FIRST_BYTES)
        log.seek(max(log.tell(), file.stat().st_size - LAST_BYTES))
        return (first + log.read(LAST_BYTES)).decode(errors="replace")


def _part_of(log: str, failed: Collection[str]) -> str:
    """Return the part, and the model if it is known: a rank's log does not name it. Empty if another actor failed."""
    names = ACTOR.findall(log)
    if not names:
        return "a process"
    actor = names[-1].rpartition(f"{APPLICATION}:")[2]
    if actor == RANK:
        gangs = [name for name in failed if name.startswith(f"{STAGES['denoiser']}-")]
        actor = gangs[0] if len(gangs) == 1 else f"{STAGES['denoiser']}-" if gangs else ""
    elif actor not in failed:
        return ""
    for prefix, part in PARTS.items():
        if actor.startswith(f"{prefix}-"):
            model = actor.removeprefix(f"{prefix}-")
            return f"{part} of {model}" if model else f"{part} of a model"
    return ""
