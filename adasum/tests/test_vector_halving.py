"""The schedule of Adasum, for 1 to 17 ranks: followed symbolically, it is the tree over hosts."""

import pytest

from harness.followed_schedules import check_rules, contributions, follow, topologies
from paceline_adasum.vector_halving import vector_halving


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_every_block_is_the_tree_over_hosts(num_ranks):
    for topology in dict.fromkeys(topologies(num_ranks)):
        plan = vector_halving(topology)
        assert plan.schedule.num_ranks == num_ranks
        check_tree(topology, follow(plan.schedule))
        for part in (plan.within, plan.spread, plan.tell, *(level.completion for level in plan.levels)):
            check_rules(part)


def check_tree(topology, held):
    """Every block is the tree over hosts, whose left side has the larger half; a leaf is a host's sum."""
    hosts = topology.ranks_of_host

    def check(expression, leaves):
        if len(leaves) == 1:
            assert contributions(expression) == sorted(leaves[0])
            return
        half = (len(leaves) + 1) // 2
        sides = sorted([leaves[:half], leaves[half:]], key=lambda side: sorted(sum(side, ())))
        for part in expression:
            side = next(side for side in sides if sorted(sum(side, ())) == contributions(part))
            check(part, side)

    for blocks in held:
        assert blocks == held[0]
        for expression in blocks:
            assert contributions(expression) == list(range(topology.num_ranks))
            check(expression, hosts)


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_vector_halving_completes_within_teams(num_ranks):
    """At each level, a team's members hold every element of its two vectors once, and only they complete."""
    for topology in dict.fromkeys(topologies(num_ranks)):
        plan = vector_halving(topology)
        for level in plan.levels:
            for team in level.teams:
                received = [t for t in level.halving if t.target in team.ranks]
                assert sorted(b for t in received for b in range(t.first, t.last)) == list(
                    range(plan.num_blocks)
                )
                assert {t.target for t in received} == set(team.ranks)
                assert (team.num_left + team.num_right) <= num_ranks
            for number, contribution in enumerate(follow(level.completion)):
                team = level.team_of(number)
                assert contributions(contribution[0]) == ([number] if team is None else sorted(team.ranks))
        if plan.levels:
            last = plan.levels[-1].teams
            assert len(last) == 1
            assert last[0].num_left + last[0].num_right == num_ranks
            told = {t.target for transfers in plan.tell.rounds for t in transfers}
            assert told | set(last[0].ranks) == set(range(num_ranks))
