"""Variables that ranks are started with: there before the loader has read them, which it does once."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from engines.core.rank import RankContext
from engines.gang.config import GangConfig, RankParts
from engines.gang.gang import Gang
from tests.engines.gang.support.fakes import FakeRequest, build_fake, fake_job, reference_latents
from tests.engines.gang.support.helpers import group_for, latents

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIBRARY = "libtroupe_probe.so"
CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, step_deadline_s=20.0)


def search_path(folder: Path) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def build_with_library(context: RankContext) -> RankParts:
    """OSError where the loader does not find the library by its name alone."""
    ctypes.CDLL(LIBRARY)
    return build_fake(context)


def any_shared_library() -> Path:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(path for line in lines if (path := Path(line.split()[-1])).name.startswith("libm.so"))


async def test_ranks_find_libraries_where_the_engine_says(ray_cluster: None, tmp_path: Path) -> None:
    shutil.copy(any_shared_library(), tmp_path / LIBRARY)
    with group_for(CONFIG) as group:
        environment = partial(search_path, tmp_path)
        gang = await Gang.start(CONFIG, build_with_library, environment=environment, placement_group=group)
        request = FakeRequest(seed=3, num_steps=2)
        given = await latents(gang, fake_job("one", request))
        await gang.close()
        assert given.equal(reference_latents(request))
        with pytest.raises(OSError, match=LIBRARY):
            await Gang.start(CONFIG, build_with_library, placement_group=group)


def refuse() -> Mapping[str, str]:
    raise RuntimeError("there is no such library here")


async def test_an_environment_that_cannot_be_made_is_the_error_of_the_start(ray_cluster: None) -> None:
    with group_for(CONFIG) as group, pytest.raises(RuntimeError, match="no such library here"):
        await Gang.start(CONFIG, build_fake, environment=refuse, placement_group=group)
