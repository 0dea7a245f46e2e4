"""A stage of ``benchmarks.denoise_step.gpu`` and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP, MODEL_STEP = "benchmarks.denoise_step", "benchmarks.model_step"
DEFAULT = "peer"
"""Option of the cases of several ranks as engines run them: they write into each other's memory."""
BF16, FP8 = "bf16", "fp8"
FOUR, FIRST, LAST, ONE = (0, 1, 2, 3), (0, 1), (2, 3), (0,)
"""GPUs of a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``module`` with ``arguments``, with one rank on each of ``gpus``. Without ``gpus`` it runs on all of the host."""

    name: str
    module: str = STEP
    arguments: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    writes_json: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Runs that start at the same time, and are stopped after ``limit_s``."""

    name: str
    runs: tuple[Run, ...]
    limit_s: int
    min_gpus: int = 1
    takes_turns: bool = False
    """One run is timed at a time."""
    likely_s: int = 0
    """Likely duration; 0 where only the limit is known."""

    @property
    def estimate_s(self) -> int:
        return self.likely_s or self.limit_s


def alone(name: str, *arguments: str, limit_s: int, min_gpus: int = 1, **options: object) -> Stage:
    """Return a stage of one run with the stage's name."""
    run = Run(name=name, arguments=arguments, **options)  # type: ignore[arg-type]
    return Stage(name=name, runs=(run,), limit_s=limit_s, min_gpus=min_gpus)


def case_name(maker: str, side: int, gpus: tuple[int, ...], option: str, precision: str = BF16) -> str:
    """Return the name of a case with one ``option``, or without ("")."""
    if not option:
        return "/".join((maker, str(side), f"w{len(gpus)}", precision, *["ulysses"] * (len(gpus) > 1)))
    several = ("ulysses", option) if len(gpus) > 1 else (option,) * (option != DEFAULT)
    return "/".join((maker, str(side), f"w{len(gpus)}", precision, *several))


def peer(name: str, maker: str, gpus: tuple[int, ...], *sides: int, precision: str = BF16) -> Run:
    cases = [case_name(maker, side, gpus, "uncaptured", precision) for side in sides]
    return Run(name=f"peer_{name}", arguments=("--only", *cases), gpus=gpus)


def ours(name: str, gpus: tuple[int, ...], *sides: int, precision: str = BF16) -> Run:
    """Return Troupe's run that stands beside peers on these GPUs."""
    cases = [case_name("fast", side, gpus, DEFAULT, precision) for side in sides or (1024,)]
    return Run(name=name, arguments=("--only", *cases), gpus=gpus)


def beside(name: str, *runs: Run, limit_s: int) -> Stage:
    """Return a stage of runs on the same GPUs that are timed one after the other."""
    num_gpus = 1 + max(gpu for run in runs for gpu in run.gpus)
    return Stage(name=name, runs=runs, limit_s=limit_s, min_gpus=num_gpus, takes_turns=True)


def at_once(name: str, *runs: Run, likely_s: int, limit_s: int) -> Stage:
    """Return a stage of runs on other GPUs each, which are timed at the same time."""
    num_gpus = 1 + max(gpu for run in runs for gpu in run.gpus)
    return Stage(name=name, runs=runs, limit_s=limit_s, min_gpus=num_gpus, likely_s=likely_s)


def joined(stages: Sequence[Stage]) -> Stage:
    """Return one stage of all runs of ``stages``, which take turns. Equal runs on the same GPUs run once."""
    runs = {(run.module, run.arguments, run.gpus): run for stage in reversed(stages) for run in reversed(stage.runs)}
    return Stage(
        name="-".join(stage.name for stage in stages),
        runs=tuple(reversed(runs.values())),
        limit_s=sum(stage.limit_s for stage in stages),
        min_gpus=max(stage.min_gpus for stage in stages),
        takes_turns=True,
    )
