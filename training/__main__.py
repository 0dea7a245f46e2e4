"""Train the shipped models on from their shipped weights, side by side, each on a GPU of its own:

    python -m training OUT [--models flux-shapes wan-shapes] [--limit-s 570]

Writes to OUT, of each model, the exported folder as a tar file as soon as there is one, the logs, and at last what
`training.evaluate` says of it in plain, unseen and fresh wording, with 48 and 512 tokens.
"""

import argparse
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

from training.evaluate import CHECKPOINTS

TRAINERS: Mapping[str, Sequence[str]] = {
    "flux-shapes": ("--captions", "240000", "--pool", "100000", "--minutes", "5.8", "--distill-minutes", "1.4"),
    "wan-shapes": ("--captions", "200000", "--pool", "20000", "--minutes", "6.2"),
}
"""Options of each model's trainer, for an H200."""
WORDINGS = ("unseen", "fresh", "plain")
LENGTHS = ("48", "512")
WRITTEN_BY_HAND = ("README.md", "troupe.json")
SMALLEST_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One model's training on GPU number `gpu`, until `end_s` of `time.monotonic`. `extra` are trainer options."""

    model: str
    gpu: int
    out: Path
    end_s: float
    extra: Sequence[str] = ()
    evaluation: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        return self.out / "folders" / self.model

    def run(self) -> bool:
        """Train, then evaluate the exported folder if there is one. Return whether all of it succeeded."""
        shipped = CHECKPOINTS / self.model
        folders = ("--start", str(shipped), "--vae", str(shipped / "vae"), "--out", str(self.out / "runs" / self.model))
        options = (*folders, "--export", str(self.folder), *TRAINERS[self.model], *self.extra)
        is_trained = self._call(f"train_{self.model}", f"training.{self.model.replace('-', '_')}", *options)
        if not self.folder.is_dir():
            return False
        for name in WRITTEN_BY_HAND:
            copy(shipped / name, self.folder)
        with tarfile.open(self.out / f"{self.model}.tar", "w") as tar:
            tar.add(self.folder, self.model)
        with ThreadPoolExecutor(len(WORDINGS)) as pool:
            return all([is_trained, *pool.map(self._evaluate, WORDINGS)])

    def _evaluate(self, wording: str) -> bool:
        what = ("--model", self.model, "--checkpoint", str(self.folder), "--wordings", wording, "--verbose")
        options = (*what, "--lengths", *LENGTHS, *self.evaluation)
        return self._call(f"evaluate_{self.model}_{wording}", "training.evaluate", *options)

    def _call(self, name: str, module: str, *options: str) -> bool:
        left_s = max(SMALLEST_LIMIT_S, self.end_s - time.monotonic())
        with (self.out / f"{name}.log").open("w") as log:
            variables = (f"CUDA_VISIBLE_DEVICES={self.gpu}", "PYTHONUNBUFFERED=1")
            command = ["env", *variables, sys.executable, "-m", module, *options]
            try:
                status = subprocess.run(command, stdout=log, stderr=log, timeout=left_s).returncode
            except subprocess.TimeoutExpired:
                status = -1
        print(f"{name}: exit {status}, {max(0.0, self.end_s - time.monotonic()):.0f} s left", flush=True)
        return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further options of the trainers")
    parser.add_argument("--evaluation", type=str.split, default=[], help='of the evaluation: "--prompts 2 --steps 1"')
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + arguments.limit_s
    shared = {"out": arguments.out.resolve(), "end_s": end_s}
    attempts = [
        Attempt(model=model, gpu=gpu, extra=arguments.extra, evaluation=arguments.evaluation, **shared)
        for gpu, model in enumerate(arguments.models)
    ]
    with ThreadPoolExecutor(len(attempts)) as pool:
        sys.exit(0 if all(list(pool.map(Attempt.run, attempts))) else 1)


if __name__ == "__main__":
    main()
