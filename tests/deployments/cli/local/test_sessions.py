"""Ray's processes lead sessions of their own; that they end with the server is tested with one."""

from __future__ import annotations

import os
import subprocess

from ray._private import services

from deployments.cli.local.sessions import own_sessions


def test_what_ray_starts_is_in_no_group_of_ours() -> None:
    before = services.ConsolePopen
    with own_sessions():
        info = services.start_ray_process(["sleep", "60"], "test", fate_share=True, stdout_file=subprocess.DEVNULL)
    try:
        assert os.getsid(info.process.pid) == info.process.pid
        assert os.getpgid(info.process.pid) != os.getpgid(0)
    finally:
        info.process.kill()
        info.process.wait()
    assert services.ConsolePopen is before
