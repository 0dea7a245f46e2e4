"""What stages hand to each other, on its way between processes."""

from __future__ import annotations

import pickle

import pytest

from deployments.stages.common import Decoded

DECODED = Decoded(data=b"the file" * 1000, thumbnail=b"small", decode_s=0.5, further=(b"above", b""))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_files_arrive_as_they_were(protocol: int) -> None:
    arrived = pickle.loads(pickle.dumps(DECODED, protocol=protocol))
    assert arrived == DECODED
    assert {type(file) for file in (arrived.data, *arrived.further)} == {bytes}


def test_files_travel_beside_what_is_pickled() -> None:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(DECODED, protocol=5, buffer_callback=buffers.append)
    assert [bytes(buffer) for buffer in buffers] == [DECODED.data, *DECODED.further]
    assert len(pickled) < 500
    assert pickle.loads(pickled, buffers=[memoryview(bytes(buffer)) for buffer in buffers]) == DECODED
