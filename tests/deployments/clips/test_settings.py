"""Settings of the job runner."""

from __future__ import annotations

import pytest

from deployments.clips.settings import JobSettings


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"lease_s is 0"):
        JobSettings(data_dir=tmp_path, lease_s=0)
    assert JobSettings(data_dir=tmp_path).url.startswith("sqlite+aiosqlite:////")
    assert JobSettings(data_dir=tmp_path, database_url="postgresql+asyncpg://h/d").url == "postgresql+asyncpg://h/d"
