"""Input pictures of clips are stored until the clip's end, over a restart, and no longer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.clips.storage import ClipFolders, StorageLostError
from deployments.clips.store import ClipStore
from engines.gang.errors import GangBrokenError
from pipelines.request import InputPicture, InputPictures, InputSound, InputVideo, MediaRequest
from tests.deployments.clips.support.runs import REQUEST as WORDS
from tests.deployments.clips.support.runs import ended, failure_of, running, started
from tests.deployments.support.fake_service import CLIPS, FakeService
from tests.deployments.support.files import noise
from tests.support.patience import PATIENCE_S
from tests.support.processes import paths_in

pytestmark = pytest.mark.usefixtures("each_database")

REQUEST = replace(WORDS, num_pictures=2, has_mask=True, num_video_frames=5, strength=0.5)
REQUEST = replace(REQUEST, further_video_frames=(3, 5), sound_samples=(6, 0, 4))
CLIP = InputVideo(
    width=WORDS.width,
    height=WORDS.height,
    num_frames=5,
    fps=WORDS.fps,
    data=noise(WORDS.width, 5 * WORDS.height).tobytes(),
)
INPUTS = InputPictures(
    pictures=(InputPicture.of(noise(48, 32)), InputPicture.of(noise(7, 5, "RGBA"))),
    video=replace(CLIP, sound=InputSound(num_channels=2, rate=8000, data=bytes(range(48)))),
    further_videos=(
        replace(CLIP, num_frames=3, data=CLIP.data[: len(CLIP.data) // 5 * 3]),
        replace(CLIP, data=CLIP.data[::-1], sound=InputSound(num_channels=1, rate=16_000, data=bytes(16))),
    ),
    video_mask=replace(CLIP, data=noise(WORDS.width, 5 * WORDS.height).tobytes()[::-1]),
)
TAKES = replace(CLIPS, max_pictures=2, masks_video=True, max_video_frames=5, takes_both=True, takes_strength=True)
TAKES = replace(TAKES, max_videos=3, video_sound_rate=8000)


def service_of_inputs(**settings: Any) -> FakeService:
    return FakeService(defaults={"fake-clips": TAKES}, **settings)


def input_files(folder: Path) -> list[str]:
    return sorted(path.name for path in paths_in(folder / "videos") if path.name.startswith("input-"))


KEPT = ["input-0.png", "input-1.png", "input-sound-0.f32", "input-sound-2.f32"]
KEPT += ["input-video-1.rgb", "input-video-2.rgb", "input-video-mask.rgb", "input-video.rgb"]


async def test_they_reach_the_service_and_are_gone_at_the_end(tmp_path: Path) -> None:
    service = service_of_inputs()
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        assert record.request == REQUEST
        assert (await ended(clips, record.id)).status == "completed"
        assert service.inputs == [INPUTS]
        async with asyncio.timeout(PATIENCE_S):
            while input_files(tmp_path):
                await asyncio.sleep(0.01)
        assert await clips.file(record.id, "video") is not None


async def test_they_outlive_the_application(tmp_path: Path, database_url: str) -> None:
    service = service_of_inputs(step_s=1000)
    async with running(service, tmp_path, database_url=database_url) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        await started(service)
        assert input_files(tmp_path) == KEPT
    assert input_files(tmp_path) == KEPT
    second = service_of_inputs()
    async with running(second, tmp_path, database_url=database_url) as clips:
        assert (await ended(clips, record.id)).status == "completed"
    assert second.inputs == [INPUTS]
    assert second.performed[0].strength == 0.5


async def test_a_second_attempt_has_them_too(tmp_path: Path) -> None:
    failures = [RuntimeError("x")]

    def fail(request: MediaRequest) -> None:
        if failures:
            raise failures.pop()

    service = service_of_inputs(before=fail)
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        assert (await ended(clips, record.id)).attempts == 2
    assert service.inputs == [INPUTS, INPUTS]


async def test_they_go_with_a_clip_that_fails(tmp_path: Path) -> None:
    def fail(request: MediaRequest) -> None:
        raise GangBrokenError("rank 1 died")

    async with running(service_of_inputs(before=fail), tmp_path) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        assert (await ended(clips, record.id)).status == "failed"
        async with asyncio.timeout(PATIENCE_S):
            while input_files(tmp_path):
                await asyncio.sleep(0.01)


async def test_they_go_with_a_clip_that_is_deleted(tmp_path: Path) -> None:
    service = service_of_inputs(step_s=1000)
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        await started(service)
        assert await clips.delete(record.id)
        assert list((tmp_path / "videos").iterdir()) == []


async def test_a_clip_whose_picture_is_gone_says_so(tmp_path: Path) -> None:
    service = service_of_inputs(reasons={"fake-clips": "not now"})
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1", pictures=INPUTS)
        (tmp_path / "videos" / record.id / "input-1.png").unlink()
        service.reasons.clear()
        record = await ended(clips, record.id)
    assert (record.status, failure_of(record).code, record.attempts) == ("failed", "invalid_value", 1)
    assert "send it again" in failure_of(record).message
    assert service.performed == []


async def test_a_clip_that_cannot_be_kept_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(service_of_inputs(), tmp_path) as clips:

        async def create(*_: object, **__: object) -> None:
            raise OSError("away")

        monkeypatch.setattr("deployments.clips.store.ClipStore.create", create)
        with pytest.raises(OSError, match="away"):
            await clips.submit(REQUEST, "1", pictures=INPUTS)
    assert list((tmp_path / "videos").iterdir()) == []


@pytest.mark.parametrize("way", ["submit", "begin"])
async def test_a_clip_whose_client_leaves_before_it_hears_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    create, written = ClipStore.create, asyncio.Event()

    async def never(*arguments: Any, **options: Any) -> None:
        await create(*arguments, **options)
        written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ClipStore, "create", never)
    async with running(service_of_inputs(reasons={"fake-clips": "not now"}), tmp_path) as clips:
        asking = asyncio.create_task(getattr(clips, way)(REQUEST, "1", pictures=INPUTS))
        async with asyncio.timeout(PATIENCE_S):
            await written.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await clips.page(after=None, limit=10, ascending=True) == ([], False)
        assert list((tmp_path / "videos").iterdir()) == []


async def test_a_clip_whose_client_leaves_before_it_hears_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with running(service_of_inputs(reasons={"fake-clips": "not now"}), tmp_path) as clips:
        with monkeypatch.context() as patch:
            patch.setattr(ClipStore, "open_clips", never)
            asking = asyncio.create_task(clips.submit(REQUEST, "1", pictures=INPUTS))
            async with asyncio.timeout(PATIENCE_S):
                await asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert await clips.page(after=None, limit=10, ascending=True) == ([], False)
        assert list((tmp_path / "videos").iterdir()) == []


async def test_a_clip_whose_client_leaves_while_inputs_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write, is_written = threading.Event(), threading.Event(), threading.Event()
    write = ClipFolders.write_inputs

    def write_slowly(*arguments: Any) -> None:
        is_writing.set()
        may_write.wait(PATIENCE_S)
        write(*arguments)
        is_written.set()

    monkeypatch.setattr(ClipFolders, "write_inputs", write_slowly)
    async with running(service_of_inputs(), tmp_path) as clips:
        asking = asyncio.create_task(clips.submit(REQUEST, "1", pictures=INPUTS))
        await asyncio.to_thread(is_writing.wait, PATIENCE_S)
        asking.cancel()
        asyncio.get_running_loop().call_later(0.2, may_write.set)
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(is_written.wait, PATIENCE_S)
        assert list((tmp_path / "videos").iterdir()) == []


def test_a_folder_that_is_not_mounted_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(StorageLostError, match="is its disk mounted"):
        ClipFolders(root=tmp_path / "videos").read_inputs("video_1", REQUEST)


async def test_a_clip_whose_record_is_written_without_an_answer_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database does not remove the record either."""
    create = ClipStore.create

    async def create_silently(*arguments: Any, **options: Any) -> None:
        await create(*arguments, **options)
        raise StorageLostError("the database does not answer")

    async def delete(*_: object) -> None:
        raise StorageLostError("the database does not answer")

    monkeypatch.setattr(ClipStore, "create", create_silently)
    monkeypatch.setattr(ClipStore, "delete", delete)
    service = service_of_inputs()
    async with running(service, tmp_path) as clips:
        with pytest.raises(StorageLostError):
            await clips.submit(REQUEST, "1", pictures=INPUTS)
        (record,), _ = await clips.page(after=None, limit=9, ascending=True)
        assert (await ended(clips, record.id)).status == "completed"
    assert service.inputs == [INPUTS]
