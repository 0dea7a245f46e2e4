"""Values packed for processes without torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.core.parcel import Parcel


@dataclass(frozen=True)
class Record:
    name: str
    x_BC: torch.Tensor
    again_BC: torch.Tensor


def test_a_value_comes_back_as_it_was() -> None:
    x_BC = torch.randn(3, 5, dtype=torch.bfloat16)
    value = Record(name="ä", x_BC=x_BC, again_BC=x_BC), torch.arange(7), torch.zeros(0, 2)
    record, numbers, empty = pickle.loads(pickle.dumps(Parcel.of(value))).open()
    assert record.name == "ä"
    assert record.x_BC is record.again_BC
    assert record.x_BC.dtype == torch.bfloat16
    assert record.x_BC.equal(x_BC)
    assert numbers.equal(torch.arange(7))
    assert empty.shape == (0, 2)


def test_what_is_opened_may_be_written_to() -> None:
    """Bytes in Ray's object store are read-only."""
    parcel = Parcel.of(torch.ones(4))
    parcel.message.flags.writeable = False
    first, second = parcel.open(), parcel.open()
    first += 1
    assert second.tolist() == [1, 1, 1, 1]


def test_the_bytes_travel_beside_the_pickle() -> None:
    """Ray reads such buffers without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(Parcel.of(torch.zeros(100_000)), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 400_000


def test_who_passes_one_on_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "parcel").write_bytes(pickle.dumps(Parcel.of(torch.ones(4))))
    code = f"""
        import pathlib, pickle, sys
        sys.path.insert(0, {str(Path(__file__).parents[4])!r})
        parcel = pickle.loads(pathlib.Path({str(tmp_path / "parcel")!r}).read_bytes())
        assert len(pickle.dumps(parcel)) > 16
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
