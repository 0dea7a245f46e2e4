"""Clips and pictures are in S3 or Google storage: whole, in ranges, signed, and 503 while it is away."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from s3fs import S3FileSystem

from deployments.clips import objects
from deployments.clips.objects import Bucket, ClipObjects
from deployments.clips.storage import StorageLostError
from deployments.config import ApiConfig
from deployments.http import files
from deployments.http.files import ObjectShelf
from tests.deployments.clips.support.runs import REQUEST, ended, running, started
from tests.deployments.clips.test_inputs import INPUTS
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.http.test_errors import error_of
from tests.deployments.support import gcs, s3
from tests.deployments.support.fake_service import CLIPS, FakeService, clip
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
AS_URL = {"prompt": "a", "response_format": "url"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3.server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def google_endpoint() -> Iterator[str]:
    if missing := gcs.missing():
        pytest.skip(f"{', '.join(missing)} not installed: install the dev extra")
    with gcs.server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_storage(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return new_bucket(endpoint, monkeypatch)


@pytest.fixture
def google_storage(google_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in gcs.environment(google_endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid4().hex}"
    gcs.make_bucket(google_endpoint, bucket)
    return f"gs://{bucket}/troupe/"


@pytest.fixture(params=["s3", "google"])
def storage(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty storage of each provider."""
    url: str = request.getfixturevalue(f"{request.param}_storage")
    return url


def new_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a prefix in a new bucket; the environment has its credentials."""
    for name, value in s3.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid4().hex}"
    s3.make_bucket(endpoint, bucket)
    return f"s3://{bucket}/troupe/"


def names_in(storage: str) -> list[str]:
    return sorted(one.name for one in Bucket(storage).list())


def api_on(storage: str, folder: Path, **settings: Any) -> Any:
    return build(FakeService(), folder, clips={"storage": storage}, **settings)


@pytest.fixture
async def client(storage: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api_on(storage, tmp_path)) as client:
        yield client


async def test_a_clip_is_served_whole_and_in_ranges_and_leaves_nothing(
    client: httpx.AsyncClient, storage: str, tmp_path: Path
) -> None:
    video = await make(client)
    await finished(client, video["id"])
    url = f"/v1/videos/{video['id']}/content"
    whole = await client.get(url)
    assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
    assert len(whole.content) == int(whole.headers["content-length"]) > 100
    part = await client.get(url, headers={"Range": "bytes=10-19", "If-Range": whole.headers["etag"]})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(whole.content)}"
    assert (await client.get(url, headers={"Range": "bytes=-5"})).content == whole.content[-5:]
    assert (await client.get(url, headers={"If-None-Match": whole.headers["etag"]})).status_code == 304
    error = error_of(await client.get(url, headers={"Range": "bytes=999999999-"}), 416)
    assert error["code"] == "range_not_satisfiable"
    head = await client.head(url)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(whole.content)))
    for variant, kind in (("thumbnail", "image/webp"), ("preview", "image/png")):
        answer = await client.get(url, params={"variant": variant})
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert not (tmp_path / "videos").exists()
    assert (await client.delete(f"/v1/videos/{video['id']}")).status_code == 200
    assert names_in(storage) == [".check"]


async def test_a_clip_whose_object_is_gone_has_failed(client: httpx.AsyncClient, storage: str) -> None:
    video = await make(client)
    await finished(client, video["id"])
    Bucket(storage).remove(f"videos/{video['id']}/clip.mp4")
    assert error_of(await client.get(f"/v1/videos/{video['id']}/content"), 410)["code"] == "video_gone"


async def test_pictures_by_url_are_of_their_key(storage: str, tmp_path: Path) -> None:
    async with client_of(api_on(storage, tmp_path, api_keys=("alpha", "beta"))) as client:
        alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
        answer = await client.post(IMAGES, json=AS_URL, headers=alpha)
        url = answer.json()["data"][0]["url"]
        read = {
            name: await client.get(url, headers=headers) for name, headers in (("a", alpha), ("b", beta), ("-", {}))
        }
        assert {name: one.status_code for name, one in read.items()} == {"a": 200, "b": 404, "-": 200}
        assert read["a"].content == read["-"].content
        assert (read["a"].headers["content-type"], read["a"].content[:4]) == ("image/png", b"\x89PNG")


async def test_signed_urls_lead_to_the_storage(s3_storage: str, endpoint: str, tmp_path: Path) -> None:
    storage = s3_storage
    async with client_of(api_on(storage, tmp_path, signed_urls=True)) as client, httpx.AsyncClient() as anybody:
        url = (await client.post(IMAGES, json=AS_URL)).json()["data"][0]["url"]
        assert url.startswith(f"{endpoint}/")
        picture = await anybody.get(url)
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
        video = await make(client)
        await finished(client, video["id"])
        answer = await client.get(f"/v1/videos/{video['id']}/content")
        assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
        assert answer.headers["location"].startswith(f"{endpoint}/")
        served = await anybody.get(answer.headers["location"])
        assert (served.status_code, served.headers["content-type"]) == (200, "video/mp4")
        assert served.content == Bucket(storage).read(f"videos/{video['id']}/clip.mp4")


async def test_old_pictures_go_and_the_oldest_make_room(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SWEEP_EVERY_S", -1.0)
    shelf = ObjectShelf(bucket=Bucket(storage), lifetime_s=1000, max_bytes=25)
    first, second, third = [shelf.put(bytes(10), "png") for _ in range(3)]
    assert [shelf.find(name) is not None for name in (first, second, third)] != [True] * 3
    assert sum(shelf.find(name) is not None for name in (first, second, third)) == 2
    assert shelf.find("../secret") is None
    late = ObjectShelf(bucket=Bucket(storage), lifetime_s=-1, max_bytes=1000)
    assert late.find(third) is None
    late.sweep()
    assert names_in(storage) == []


async def test_inputs_outlive_the_application_and_end_with_the_clip(storage: str, tmp_path: Path) -> None:
    takes_all = replace(CLIPS, max_pictures=2, takes_mask=True, masks_video=True, takes_both=True, max_video_frames=17)
    served = {REQUEST.model: replace(takes_all, max_videos=3, video_sound_rate=8000)}
    asked = replace(REQUEST, num_pictures=2, has_mask=True, num_video_frames=5)
    asked = replace(asked, further_video_frames=(3, 5), sound_samples=(6, 0, 4))
    service = FakeService(step_s=1000, defaults=served)
    async with running(service, tmp_path, storage=storage) as clips:
        record = await clips.submit(asked, "1", pictures=INPUTS)
        await started(service)
    second = FakeService(defaults=served)
    async with running(second, tmp_path, storage=storage) as clips:
        assert (await ended(clips, record.id)).status == "completed"
        async with asyncio.timeout(PATIENCE_S):
            while any("input-" in name for name in names_in(storage)):
                await asyncio.sleep(0.01)
    assert second.inputs == [INPUTS]
    assert Bucket(storage).read(f"videos/{record.id}/clip.mp4") == clip(asked)


async def test_objects_without_a_record_are_swept(storage: str, tmp_path: Path) -> None:
    ClipObjects(bucket=Bucket(storage)).write("video_of_nobody", "video", b"left by a crash")
    async with running(FakeService(), tmp_path, storage=storage, orphan_s=0.05), asyncio.timeout(PATIENCE_S):
        while names_in(storage) != [".check"] and names_in(storage):
            await asyncio.sleep(0.05)


def test_objects_are_swept_at_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a wrong database knows none of the clips. All are deleted within two hours, as documented."""
    now_s = [1000.0]
    bucket = Bucket("memory://orphans")
    for clip_id in ("video_1", "video_2"):
        ClipObjects(bucket=bucket).write(clip_id, "video", b"made by another server")
    orphans = objects.ObjectOrphans(bucket=bucket, patience_s=60.0)
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    found = []
    for look_s, known in ((0, set[str]()), (10, set[str]()), (60, {"video_2"}), (60, set[str]())):
        now_s[0] += look_s
        found.append(sorted(orphans.folders()))
        orphans.sweep(set(found[-1]) - known)
        found.append(sorted(one.name.split("/")[1] for one in bucket.list("videos")))
    both = ["video_1", "video_2"]
    assert found == [both, both, [], both, both, ["video_2"], ["video_2"], ["video_2"]]


async def test_while_the_storage_is_away_it_is_503_and_afterwards_as_before(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.clips.objects.CHECK_EVERY_S", 0.0)
    monkeypatch.setitem(objects.TIMEOUTS, "retries", {"max_attempts": 0})
    line = s3.Line(endpoint)
    url, storage = await line.mend(), new_bucket(endpoint, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    S3FileSystem.clear_instance_cache()  # it would keep the endpoint of earlier tests
    async with client_of(api_on(storage, tmp_path)) as client:
        video = await make(client)
        await finished(client, video["id"])
        content = f"/v1/videos/{video['id']}/content"
        line.cut()
        for answer in (
            await client.get(content),
            await client.post("/v1/videos", json={"prompt": "a"}),
            await client.post(IMAGES, json=AS_URL),
        ):
            error = error_of(answer, 503)
            assert (error["code"], "retry-after" in answer.headers) == ("storage_unavailable", True)
            assert storage.rstrip("/") in error["message"]
        assert "cannot be used" in (await client.get("/health")).json()["storage"]
        assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 200, "needs no storage"
        await line.mend()
        assert (await client.get(content)).status_code == 200
        assert (await client.get("/health")).json()["storage"] == "ok"
    line.cut()
    S3FileSystem.clear_instance_cache()


def test_signed_urls_of_google_lead_to_the_storage(
    google_storage: str, google_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not check signatures; the signer has the key of a service account."""
    from google.auth.crypt import RSASigner
    from google.oauth2 import service_account

    bucket = Bucket(google_storage)
    bucket.write("files/a.png", b"a picture")
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    signer: Any = RSASigner
    credentials: Any = service_account.Credentials
    signing = credentials(signer.from_string(pem), "a@tests", "")
    monkeypatch.setattr(bucket.files.credentials, "credentials", signing)
    url = urlsplit(bucket.sign("files/a.png", 600, "image/png"))
    query = parse_qs(url.query)
    assert f"{url.scheme}://{url.netloc}" == google_endpoint
    assert query["response-content-type"] == ["image/png"]
    assert 0 < int(query["Expires"][0]) - time.time() <= 600
    assert httpx.get(url.geturl()).content == b"a picture"


def test_a_google_server_that_hangs_is_unavailable(
    google_endpoint: str, google_storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, gcsfs waits for ever. Its own retries have no pauses here."""
    import gcsfs

    async def at_once(_: float) -> None:
        """Do not pause."""

    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=at_once))
    monkeypatch.setattr(objects, "READ_TIMEOUT_S", 0.05)
    gcsfs.GCSFileSystem.clear_instance_cache()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        bucket = Bucket(google_storage)
        with pytest.raises(StorageLostError, match="cannot be used"):
            bucket.read("a")
        assert isinstance(bucket.problem(), StorageLostError)
    gcsfs.GCSFileSystem.clear_instance_cache()


def test_a_file_whose_upload_is_cut_is_not_there(s3_storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are uploaded in parts, and exist once all parts do."""
    bucket, parts = Bucket(s3_storage), list[str]()
    call = bucket.files._call_s3

    async def cut(method: str, *args: Any, **options: Any) -> Any:
        parts.append(method)
        if parts.count("upload_part") == 2:
            raise ConnectionError("cut")
        return await call(method, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(bucket.files, "_call_s3", cut)
        with pytest.raises(StorageLostError, match="cut"):
            bucket.write("videos/v/clip.mp4", bytes(101 << 20))
    assert parts[-1] == "abort_multipart_upload"
    assert bucket.find("videos/v/clip.mp4") is None


def test_a_bucket_that_does_not_exist_is_unavailable(storage: str) -> None:
    url = f"{storage.partition('://')[0]}://b-of-nobody/x"
    bucket = Bucket(url)
    with pytest.raises(StorageLostError, match=url):
        bucket.write("a", b"")
    assert isinstance(bucket.problem(), StorageLostError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"storage": "/folder"}, "for a folder, set data_dir"),
        ({"storage": "file:///folder"}, "for a folder, set data_dir"),
        ({"signed_urls": True}, "no storage to sign for"),
    ],
)
def test_what_cannot_be_configured(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ApiConfig(**fields)


def test_a_storage_without_its_package() -> None:
    with pytest.raises(ValueError, match="storage is 'nosuch://x', which cannot be used"):
        _ = Bucket("nosuch://x").files
