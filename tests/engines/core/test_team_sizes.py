"""Teams of one size fill the gang."""

import subprocess
import sys

from engines.core.team_sizes import aligned_runs, tiling_sizes


def test_aligned_runs_fill_the_gang() -> None:
    assert aligned_runs(4, 2) == [(0, 1), (2, 3)]
    assert tiling_sizes(6) == (1, 2, 3, 6)


def test_a_scheduler_needs_no_torch() -> None:
    code = "import sys, engines.gang.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
