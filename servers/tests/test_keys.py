"""How parameters are cut into keys: nothing is lost, and servers have the same bytes at every moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigurationError
from paceline_servers.ranks.pieces import ALIGNED_ELEMENTS, KEYS_PER_SERVER, cut_keys, largest_key_bytes

sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=40)


@given(sizes, st.data(), st.integers(1, 9))
def test_keys_cover_every_element_once_and_any_prefix_is_balanced(sizes, data, num_servers):
    widths = data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=len(sizes), max_size=len(sizes)))
    try:
        keys = cut_keys(sizes, widths, num_servers)
    except ConfigurationError:
        assert sum(-(-size // ALIGNED_ELEMENTS) for size in sizes) < num_servers
        return
    total = sum(size * width for size, width in zip(sizes, widths, strict=True))
    loads, largest, covered = [0] * num_servers, 0, dict.fromkeys(range(len(sizes)), 0)
    before = len(sizes)
    for number, key in enumerate(keys):
        assert key.number == number
        assert key.parameter <= before, "backward runs from the end"
        before = key.parameter
        assert key.start == covered[key.parameter]
        assert key.start % ALIGNED_ELEMENTS == 0
        covered[key.parameter] = key.stop
        num_bytes = (key.stop - key.start) * widths[key.parameter]
        assert num_bytes <= largest_key_bytes(total, num_servers, widths[key.parameter])
        largest = max(largest, num_bytes)
        loads[key.server] += num_bytes
        assert max(loads) - min(loads) <= largest
    assert [covered[index] for index in range(len(sizes))] == sizes


def test_a_large_model_is_shared_to_a_64th():
    keys = cut_keys([10_000_000, 5, 3_000_000], [4, 4, 4], 7)
    loads = [sum(key.stop - key.start for key in keys if key.server == server) for server in range(7)]
    assert max(loads) <= min(loads) * (1 + 1 / KEYS_PER_SERVER)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ConfigurationError, match="start at least one"):
        cut_keys([100], [4], 0)
    with pytest.raises(
        ConfigurationError, match=r"5 parameter servers are too many for a model of 400 bytes.* at most 2"
    ):
        cut_keys([100], [4], 5)
