"""Times of a step of FLUX.1-dev on H200s: benchmarks/reports/denoise_step_h200_2026-11-21.md."""

from __future__ import annotations

from benchmarks.policies.simulation import StepTable

NUM_STEPS = 28
STEPS: StepTable = {
    "512x512": {1: 0.0354, 2: 0.0215, 4: 0.0127},
    "1024x1024": {1: 0.121, 2: 0.068, 4: 0.036},
    "2048x2048": {1: 0.730, 2: 0.398, 4: 0.183},
}
"""Seconds by pixels and ranks. 2048 x 2048 on one and two ranks were measured in the application."""
SHARES = {"512x512": 0.70, "1024x1024": 0.25, "2048x2048": 0.05}
