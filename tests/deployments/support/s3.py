"""An S3 server for tests (moto's), and the environment that selects it."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import boto3
from moto.server import ThreadedMotoServer


def environment(endpoint: str) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server on a free port of this machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str) -> None:
    names = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **names).create_bucket(Bucket=name)


class Line:
    """A connection to ``endpoint`` that can be cut, with all its streams, and restored."""

    def __init__(self, endpoint: str) -> None:
        self._target, self._port, self._writers = urlsplit(endpoint), 0, list[StreamWriter]()

    async def mend(self) -> str:
        """Return its own URL, the same each time."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self._port}"

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers += [writer, other_writer]
        with suppress(OSError):
            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))


async def pump(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
