"""Files in object storage, through fsspec: ``s3://``, ``gs://`` and others."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from deployments.clips.storage import FILE_NAMES, StorageLostError, Variant, input_files, inputs_of
from pipelines.request import InputPictures, MediaRequest

CHECK_EVERY_S = 10.0
"""Time for which a check that found nothing counts: each writes an object."""
BLOCK_BYTES = 1 << 20
"""Size of one read."""
CHECK_NAME = ".check"
TIMEOUTS: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 2}}
CONTENT_TYPE_KEYS = {
    "s3": "ResponseContentType",
    "s3a": "ResponseContentType",
    "gs": "response_type",
    "gcs": "response_type",
}
"""Argument of ``sign`` for the type that the storage answers with."""
GOOGLE = ("gs", "gcs")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 20.0
"""Timeouts of one attempt. gcsfs makes six, with half a minute of pauses between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """An object as it was when it was looked up."""

    bucket: Bucket
    """Bucket of the object."""
    name: str
    """Its key in the bucket."""
    num_bytes: int
    """Its size."""
    modified_s: float
    """Unix time."""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stat_result(self) -> os.stat_result:
        """Size and time of change, as those of a regular file."""
        times = (self.modified_s,) * 3
        return os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 0, 0, self.num_bytes, *times))

    def read_bytes(self) -> bytes:
        return self.bucket.read(self.name)

    def open(self) -> Any:
        """Return it as an open file, which reads only the requested ranges."""
        with self.bucket.available():
            options = {"block_size": BLOCK_BYTES, "cache_type": "readahead"}
            return self.bucket.files.open(self.bucket.path(self.name), "rb", **options)


class Bucket:
    """All objects below ``url``. Each is written whole or not at all. Blocks: not for an event loop.

    StorageLostError if the storage cannot be used now.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._checked_s: float | None = None

    @cached_property
    def files(self) -> Any:
        """The file system of fsspec. ValueError if its package is not installed."""
        import fsspec  # seconds, with a provider's client

        scheme = self._url.partition("://")[0]
        try:
            return fsspec.filesystem(scheme, use_listings_cache=False, **_options(scheme))
        except (ImportError, ValueError) as error:
            raise ValueError(f"storage is {self._url!r}, which cannot be used: {error}") from None

    def path(self, name: str) -> str:
        return f"{self.files._strip_protocol(self._url)}/{name}"

    @contextmanager
    def available(self) -> Iterator[None]:
        """Raise StorageLostError for what fails inside the block, but FileNotFoundError for an object that is gone."""
        try:
            yield
        except (FileNotFoundError, StorageLostError):
            raise
        except Exception as error:  # each provider's client has errors of its own
            raise StorageLostError(
                f"the storage {self._url} cannot be used: {error or type(error).__name__}"
            ) from error

    def write(self, name: str, data: bytes) -> None:
        with self.available():
            try:
                self.files.pipe_file(self.path(name), data)
            except FileNotFoundError as error:
                raise StorageLostError(f"the storage {self._url} does not exist: {error}") from error

    def join(self, name: str, parts: Iterable[str]) -> int:
        """Write an object of all ``parts``, which are names of objects, one after the other. Return its size."""
        with self.available():
            file = self.files.open(self.path(name), "wb")
            try:
                for part in parts:
                    file.write(self.files.cat_file(self.path(part)))
                num_bytes: int = file.tell()
            except BaseException:
                file.discard()
                raise
            file.close()
            return num_bytes

    def read(self, name: str) -> bytes:
        """Return the content of an object. FileNotFoundError if it is not there."""
        with self.available():
            data: bytes = self.files.cat_file(self.path(name))
            return data

    def find(self, name: str) -> StoredObject | None:
        """Return an object; None if it is not there."""
        with self.available():
            try:
                found = self.files.info(self.path(name))
            except FileNotFoundError:
                return None
        return self._object(found) if found["type"] == "file" else None

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return all objects below ``prefix``."""
        with self.available():
            found = self.files.find(self.path(prefix).rstrip("/"), detail=True)
        return [self._object(one) for one in found.values() if one["type"] == "file"]

    def remove(self, *names: str) -> None:
        """Delete objects; those that are gone are no error."""
        with self.available():
            for name in names:
                try:
                    self.files.rm_file(self.path(name))
                except FileNotFoundError:
                    continue

    def sign(self, name: str, lifetime_s: float, content_type: str) -> str:
        """Return a URL of an object at its provider, which needs no key for ``lifetime_s``."""
        with self.available():
            key = CONTENT_TYPE_KEYS.get(self._url.partition("://")[0])
            options = {} if key is None else {key: content_type}
            url: str = self.files.sign(self.path(name), expiration=int(lifetime_s), **options)
            return url

    def problem(self) -> StorageLostError | None:
        """Return why nothing can be written now; None if it can."""
        if self._checked_s is not None and time.monotonic() - self._checked_s < CHECK_EVERY_S:
            return None
        try:
            self.write(CHECK_NAME, b"")
        except StorageLostError as problem:
            return problem
        self._checked_s = time.monotonic()
        return None

    def _object(self, info: dict[str, Any]) -> StoredObject:
        modified = next((info[key] for key in ("LastModified", "mtime", "updated", "created") if info.get(key)), 0.0)
        if isinstance(modified, str):
            modified = datetime.fromisoformat(modified)
        modified_s = modified.timestamp() if isinstance(modified, datetime) else float(modified)
        name = str(info["name"]).removeprefix(self.path(""))
        return StoredObject(bucket=self, name=name, num_bytes=int(info["size"]), modified_s=modified_s)


def _options(scheme: str) -> dict[str, Any]:
    """Return options of fsspec for a URL. All others are in the environment, as each provider has them."""
    if scheme == "s3":
        return {"config_kwargs": TIMEOUTS}
    if scheme in GOOGLE:  # gcsfs would wait for ever
        from aiohttp import ClientTimeout

        return {"requests_timeout": ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)}
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipObjects:
    """``ClipFolders`` in object storage: a prefix for each clip. Raises StorageLostError."""

    bucket: Bucket
    """Bucket of the objects."""

    def write(self, clip_id: str, variant: Variant, data: bytes) -> None:
        self.bucket.write(_name(clip_id, FILE_NAMES[variant]), data)

    def find(self, clip_id: str, variant: Variant) -> StoredObject | None:
        return self.bucket.find(_name(clip_id, FILE_NAMES[variant]))

    def write_inputs(self, clip_id: str, inputs: InputPictures) -> None:
        """Write input pictures and clip, lossless."""
        for name, data in input_files(inputs):
            self.bucket.write(_name(clip_id, name), data)

    def read_inputs(self, clip_id: str, request: MediaRequest) -> InputPictures:
        """Return what ``write_inputs`` wrote. FileNotFoundError if missing."""
        return inputs_of(request, lambda name: self.bucket.read(_name(clip_id, name)))

    def remove_inputs(self, clip_id: str) -> None:
        with suppress(StorageLostError):  # at the latest, they are deleted with the clip
            self._remove(clip_id, "input-")

    def remove(self, clip_id: str) -> None:
        """Delete all files of the clip, if there are any."""
        self._remove(clip_id)

    def prepare(self) -> None:
        """Do nothing: a prefix needs no making."""

    def problem(self) -> StorageLostError | None:
        return self.bucket.problem()

    def orphans(self, patience_s: float) -> ObjectOrphans:
        return ObjectOrphans(bucket=self.bucket, patience_s=patience_s)

    def _remove(self, clip_id: str, beginning: str = "") -> None:
        prefix = _name(clip_id, beginning)
        self.bucket.remove(*(one.name for one in self.bucket.list(_name(clip_id)) if one.name.startswith(prefix)))


def _name(clip_id: str, name: str = "") -> str:
    return f"videos/{clip_id}/{name}"


@dataclass(kw_only=True, slots=True)
class ObjectOrphans:
    """Objects of clips without a record. The second look deletes them: a wrong database URL may be corrected."""

    bucket: Bucket
    """Bucket of the objects."""
    patience_s: float
    """Interval at which all objects are listed."""
    _listed_s: float | None = field(default=None, init=False)
    """Time of the last listing of all objects; None: never."""
    _is_new: bool = field(default=False, init=False)
    """True if they were listed since the last sweep."""
    _unknown_ids: set[str] = field(default_factory=set, init=False)
    """Ids without a record at the look before."""

    def folders(self) -> list[str]:
        """Return the ids that have objects; none before it is time to look again."""
        now_s = time.monotonic()
        if self._listed_s is not None and now_s - self._listed_s < self.patience_s:
            return []
        self._listed_s, self._is_new = now_s, True
        return list({one.name.split("/")[1] for one in self.bucket.list("videos")})

    def sweep(self, unknown_ids: set[str]) -> None:
        """Delete the objects of ``unknown_ids`` that had no record ``patience_s`` ago either."""
        if not self._is_new:
            return
        for clip_id in unknown_ids & self._unknown_ids:
            ClipObjects(bucket=self.bucket).remove(clip_id)
        self._unknown_ids, self._is_new = unknown_ids, False
