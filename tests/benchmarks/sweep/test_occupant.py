"""The occupant leaves the requested amount of a GPU's memory; less is an error."""

from __future__ import annotations

import sys

import pytest

from benchmarks.sweep import occupant
from benchmarks.sweep.occupant import fill, occupied, wait_quiet

GIB, MIB = 2**30, 2**20


class Memory:
    """A GPU that allocates memory in steps of 2 MiB, with some extra for each."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.sizes: list[int] = []

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self.free -= size
        return size


@pytest.mark.parametrize("leave", [0, 12 * GIB, 138 * GIB, 139 * GIB - 5 * MIB, 23 * GIB + 12345])
def test_all_but_what_is_left_is_held(leave: int) -> None:
    memory = Memory(139 * GIB + 777)
    held = fill(leave, lambda: memory.free, memory.allocate)
    assert 0 <= memory.free - leave < occupant.LEAST_BYTES
    assert all(size % occupant.STEP_BYTES == 0 and size >= occupant.LEAST_BYTES // 2 for size in memory.sizes)
    assert held == memory.sizes


def test_less_memory_than_is_to_be_left_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"12\.0 GiB are to be left, and 11.0 are free: end other programs"):
        fill(12 * GIB, lambda: 11 * GIB, lambda size: size)


def test_programs_that_end_are_waited_for() -> None:
    free = iter([3, 5, 9, 9, 10])
    wait_quiet(lambda: next(free), pause_s=0.0)
    assert next(free) == 10


SAYS = """import sys
print('{{"left": {left}}}', flush=True)
sys.stdin.read()
print('{{"least": {least}, "most": {most}}}')
"""


def says(monkeypatch: pytest.MonkeyPatch, left: int, least: int, most: int) -> None:
    """Put a program in place of the occupant, which prints these bytes."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    script = SAYS.format(left=left, least=least, most=most)
    monkeypatch.setattr(occupant, "COMMAND", (sys.executable, "-c", script))


def test_what_was_held_is_known_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, 12 * GIB, 4 * GIB, 12 * GIB + MIB)
    with occupied(12 * GIB) as found:
        assert found == {}
    assert found == {"left_gib": 12.0, "held_gib": 8.0}
    with pytest.raises(KeyError), occupied(12 * GIB) as found:
        raise KeyError
    assert found == {"left_gib": 12.0, "held_gib": 8.0}


def test_memory_that_others_give_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, 12 * GIB, 4 * GIB, 14 * GIB)
    with pytest.raises(RuntimeError, match=r"14\.0 GiB became free, and 12.0 were left"), occupied(12 * GIB):
        pass


def test_an_occupant_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(occupant, "COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(RuntimeError, match="memory is not held"), occupied(12 * GIB):
        pytest.fail("the block begins")


def test_nothing_is_held_without_a_gpu() -> None:
    with occupied(12 * GIB) as found:
        pass
    assert found == {}
