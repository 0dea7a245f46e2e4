"""The runner of clips checks its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.clips.settings import ClipSettings


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lease_s is 0"):
        ClipSettings(data_dir=tmp_path, lease_s=0)
    assert ClipSettings(data_dir=tmp_path).url.startswith("sqlite:////")
    assert ClipSettings(data_dir=tmp_path, database_url="postgresql+asyncpg://h/d").url == "postgresql+asyncpg://h/d"
