import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.core.layout import TokenLayout
from engines.parallel.local_attention import take_rows
from tests.support.unhurried import UNHURRIED

lengths = st.lists(st.integers(0, 23), min_size=1, max_size=3)


def make(given_lengths: list[int], num_chunks: int) -> TokenLayout:
    names = tuple((f"stream{i}", length) for i, length in enumerate(given_lengths))
    return TokenLayout(lengths=names, num_chunks=num_chunks)


@settings(**UNHURRIED)
@given(lengths, st.integers(1, 8), st.integers(-2, 1))
def test_join_undoes_cut(given_lengths: list[int], num_chunks: int, dim: int) -> None:
    layout = make(given_lengths, num_chunks)
    for stream, length in layout.lengths:
        x = torch.randn(length, 3) if dim % 2 == 0 else torch.randn(3, length)
        chunks = torch.stack([layout.cut(x, dim=dim, stream=stream, index=i) for i in range(num_chunks)])
        assert chunks.shape[1:][dim] == layout.chunk(stream)
        assert torch.equal(layout.join(chunks, dim=dim, stream=stream), x)


@settings(**UNHURRIED)
@given(lengths, st.integers(1, 8))
def test_streams_that_are_one_tensor_are_cut_one_by_one(given_lengths: list[int], num_chunks: int) -> None:
    layout = make(given_lengths, num_chunks)
    names = tuple(name for name, _ in layout.lengths)
    parts = [torch.randn(2, length) for length in given_lengths]
    for index in range(num_chunks):
        chunk = layout.cut_streams(torch.cat(parts, dim=1), dim=1, streams=names, index=index)
        apart = [layout.cut(x, dim=1, stream=name, index=index) for x, name in zip(parts, names, strict=True)]
        assert torch.equal(chunk, torch.cat(apart, dim=1))
        assert chunk.shape[1] == layout.chunk_length


@settings(**UNHURRIED)
@given(lengths, st.integers(1, 8), st.data())
def test_valid_rows_are_the_tokens_and_nothing_else(
    given_lengths: list[int], num_chunks: int, data: st.DataObject
) -> None:
    layout = make(given_lengths, num_chunks)
    first = data.draw(st.integers(0, num_chunks - 1))
    num = data.draw(st.integers(1, num_chunks - first))
    rows = []  # token numbers from 1; padding is 0
    for index in range(first, first + num):
        for number, (stream, length) in enumerate(layout.lengths):
            tokens = 1 + 100 * number + torch.arange(length)
            rows.append(layout.cut(tokens, dim=0, stream=stream, index=index))
    together = torch.cat(rows)
    valid = layout.valid_rows(first, num)
    if valid is None:
        assert (together > 0).all()
    elif valid == ():
        assert (together == 0).all()
    else:
        kept = take_rows(together[None], valid)[0]
        assert torch.equal(kept, together[together > 0])


def test_even_lengths_need_no_cropping() -> None:
    layout = make([16, 64], 4)
    assert layout.valid_rows(0, 4) is None
    assert make([15, 64], 4).valid_rows(0, 4) is not None


def test_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="stream 'stream0' with 5 tokens"):
        make([5], 2).cut(torch.zeros(1, 4), dim=1, stream="stream0", index=0)
    with pytest.raises(ValueError, match="shard plan names"):
        TokenLayout.of(("text", "image"), {"image": 3}, 2)
