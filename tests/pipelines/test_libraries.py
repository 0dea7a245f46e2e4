"""A process that loads a model quickly skips unneeded libraries, and imports them later on demand."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LMSDiscreteScheduler

from tests.support.fenced import ROOT
from tests.support.patience import PATIENCE_S

PROGRAM = """
import gc, json, sys
from pipelines.libraries import quick_imports

with quick_imports():
    from pipelines.checkpoint import Checkpoint
    checkpoint = Checkpoint.open("flux-shapes")
    parts = [checkpoint.text_encoder(), checkpoint.denoiser(), checkpoint.sampler(), checkpoint.decoder()]
spared = ("scipy.stats._stats_py", "scipy.integrate._quadrature", "scipy.optimize", "peft")
seen = {"loaded": [name for name in spared if name in sys.modules], "gc": [gc.isenabled(), gc.get_freeze_count() > 0]}

from tests.pipelines.test_libraries import beta_sigmas, linear_multistep

seen["computed"] = [beta_sigmas(), linear_multistep()]
import peft
from scipy.integrate._quadrature import simpson
print(json.dumps(seen))
"""
"""A program whose last imports are hidden or deferred modules."""


def beta_sigmas() -> list[float]:
    """Use ``scipy.stats``."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True, shift=3.0)
    scheduler.set_timesteps(5)
    return [float(sigma) for sigma in scheduler.sigmas]


def linear_multistep() -> list[float]:
    """Use ``scipy.integrate``."""
    scheduler = LMSDiscreteScheduler()
    scheduler.set_timesteps(5)
    return [scheduler.get_lms_coefficient(3, 3, order) for order in range(3)]


def test_nothing_is_loaded_in_vain_and_nothing_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["loaded"] == []
    assert seen["gc"] == [True, True]
    for computed, expected in zip(seen["computed"], [beta_sigmas(), linear_multistep()], strict=True):
        torch.testing.assert_close(torch.tensor(computed), torch.tensor(expected), rtol=0, atol=0)
