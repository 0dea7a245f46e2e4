"""What was recorded, as it is written and read."""

from __future__ import annotations

from importlib.resources import files

import pytest

from engines.torch_engine.cublaslt import Algorithm, Problem, Recorded, Table
from engines.torch_engine.cublaslt.table import file_name, table_of

FILES = sorted((files("engines.torch_engine.cublaslt") / "recorded").iterdir(), key=lambda path: path.name)
TABLE = Table(
    gpu="NVIDIA H200",
    version="13.1",
    recorded=tuple(
        Recorded(
            problem=Problem(rows=rows, features=32, inner=16, epilogue="gelu"),
            algorithm=Algorithm(family=66, tile=20, stages=35, cluster=3, option=rows),
            us=9.5,
            default_us=10,
        )
        for rows in (1, 2)
    ),
)


def test_a_table_is_read_as_it_was_written() -> None:
    text = TABLE.to_json()
    assert Table.of_json(text) == TABLE
    assert len(text.splitlines()) == 4  # an entry a line: changes can be read
    assert [algorithm.option for algorithm in TABLE.algorithms.values()] == [1, 2]


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_what_comes_with_troupe(path: object) -> None:
    table = next(table for table in (table_of(gpu) for gpu in ("NVIDIA H200",)) if table is not None)
    assert file_name(table.gpu) == getattr(path, "name", "")
    assert len(table.algorithms) == len(table.recorded) > 0
    assert all(entry.us < entry.default_us for entry in table.recorded)


def test_a_gpu_of_which_nothing_is_known() -> None:
    assert table_of("NVIDIA GeForce RTX 5090") is None
    assert file_name("NVIDIA GeForce RTX 5090") == "nvidia_geforce_rtx_5090.json"
