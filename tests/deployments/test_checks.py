"""Settings that must be above 0 say so, each by its name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.clips.settings import ClipLimits, ClipSettings
from deployments.door.door_settings import DoorSettings
from deployments.http.settings import ApiLimits, ApiSettings

POSITIVE: dict[Callable[..., Any], tuple[str, ...]] = {
    ApiLimits: ("max_body_bytes", "body_deadline_s", "max_open_requests", "max_watchers", "keep_batches_s"),
    ApiSettings: ("max_body_bytes", "file_lifetime_s", "max_files_bytes", "keepalive_s", "video_poll_s"),
    ClipLimits: ("max_concurrent_videos", "max_waiting_videos", "keep_videos_s"),
    ClipSettings: ("max_waiting_videos", "lease_s", "poll_s", "max_attempts"),
    DoorSettings: ("max_connections", "max_head_bytes", "head_timeout_s", "idle_timeout_s"),
}


@pytest.mark.parametrize(("settings", "name"), [(one, name) for one, names in POSITIVE.items() for name in names])
def test_what_must_be_above_0(settings: Callable[..., Any], name: str, tmp_path: Path) -> None:
    others = {"data_dir": tmp_path} if settings in (ApiSettings, ClipSettings) else {}
    section = "door." if settings is DoorSettings else ""
    for value in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=rf"^{section}{name} is {value}; it must be above 0$"):
            settings(**others, **{name: value})
    settings(**others, **{name: 1})


def test_clips_and_batches_may_be_kept_for_ever() -> None:
    assert ClipLimits(keep_videos_s=None).keep_videos_s is None
    assert ApiLimits(keep_batches_s=None).keep_batches_s is None
