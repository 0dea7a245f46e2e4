import pytest

from engines.core.attention import share_heads


@pytest.mark.parametrize(
    ("heads", "key_heads", "num_ranks", "queries", "keys", "repeats"),
    [
        (24, 24, 4, 6, 6, 1),
        (30, 30, 4, 8, 8, 1),  # Z-Image: two of 32 are zeros
        (5, 5, 1, 5, 5, 1),
        (32, 8, 4, 8, 2, 1),
        (32, 8, 8, 4, 1, 1),
        (32, 8, 16, 2, 1, 2),
        (32, 8, 32, 1, 1, 4),
        (24, 12, 8, 3, 3, 2),  # unchanged, 12 key heads would make 32 query heads of 24
        (28, 4, 3, 10, 10, 7),
        (28, 4, 8, 4, 4, 7),
        (6, 1, 4, 2, 1, 3),
    ],
)
def test_shares(heads: int, key_heads: int, num_ranks: int, queries: int, keys: int, repeats: int) -> None:
    share = share_heads(heads, key_heads, num_ranks)
    assert (share.queries, share.keys, share.repeats) == (queries, keys, repeats)


def test_every_query_head_meets_its_own_key_head() -> None:
    """For all small numbers the key heads of a rank serve its query heads."""
    for group, key_heads, num_ranks in ((g, k, n) for g in range(1, 7) for k in range(1, 13) for n in range(1, 9)):
        heads = group * key_heads
        share = share_heads(heads, key_heads, num_ranks)
        assert share.all_queries >= heads
        assert share.all_keys >= key_heads * share.repeats
        repeated = [key for key in range(key_heads) for _ in range(share.repeats)]
        for head in range(heads):
            rank, place = divmod(head, share.queries)
            key = rank * share.keys + place // (share.queries // share.keys)
            assert repeated[key] == head // group


def test_key_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="10 query heads cannot share 4 key heads"):
        share_heads(10, 4, 2)
