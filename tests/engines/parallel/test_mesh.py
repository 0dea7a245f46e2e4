from engines.core.spec import ParallelSpec
from engines.parallel.mesh import Groups, Teams, lines


def test_lines_of_a_mesh() -> None:
    spec = ParallelSpec(guidance=2, ring=2, ulysses=2)
    ranks = tuple(range(8))
    assert list(lines(ranks, spec, ("ulysses",))) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(lines(ranks, spec, ("ring",))) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(lines(ranks, spec, ("guidance",))) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(lines(ranks, spec, ("ring", "allgather_kv", "ulysses"))) == [(0, 1, 2, 3), (4, 5, 6, 7)]


class NamedGroups(Groups):
    """Groups that record the order in which they are used."""

    def __init__(self) -> None:
        super().__init__(4)
        self.asked: list[tuple[int, ...]] = []

    def name(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) > 1 and ranks not in self.asked:
            self.asked.append(ranks)
        return "-".join(map(str, ranks))


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    specs = [ParallelSpec(), ParallelSpec(ulysses=2), ParallelSpec(guidance=2, ring=2), ParallelSpec(ulysses=4)]
    orders = []
    for rank in range(4):
        groups = NamedGroups()
        teams = Teams(rank=rank, num_ranks=4, specs=specs, groups=groups)
        assert all(rank in team.ranks for team in teams.all())
        assert len(teams.all()) == 4
        orders.append(groups.asked)
    assert all(order == orders[0] for order in orders)


def test_axes_say_where_a_rank_is() -> None:
    spec = ParallelSpec(ring=2, ulysses=2)
    teams = Teams(rank=2, num_ranks=4, specs=[spec], groups=NamedGroups())
    team = teams.team((0, 1, 2, 3), spec)
    assert (team.ring.index, team.ulysses.index, team.context.index) == (1, 0, 2)
    assert team.ulysses.group == "2-3"
    assert team.tensor.size == 1
