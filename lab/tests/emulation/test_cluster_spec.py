"""What an emulated cluster may be asked to be: words to numbers, and what is refused."""

from __future__ import annotations

import pytest

from paceline import quantities as q
from paceline.errors import ConfigurationError
from paceline_lab.emulation import ClusterSpec
from paceline_lab.emulation import quantities as sizes


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("1Gbit", 1e9),
        ("100 Mbit/s", 1e8),
        ("2.5gbit/s", 2.5e9),
        ("64kbit", 64e3),
        ("1e2Mbit", 1e8),
        ("10mbits", 1e7),
    ],
)
def test_rates(text, bits_per_s):
    assert q.rate(text, "--rate") == bits_per_s


def test_a_rate_that_can_be_read_in_two_ways_is_refused():
    """`bps` is bits a second to networkers, and bytes to `tc`: both are offered."""
    with pytest.raises(ConfigurationError, match=r"--rate 2.5Gbit for bits, --rate 20Gbit for bytes"):
        q.rate("2.5Gbps", "--rate")
    with pytest.raises(ConfigurationError, match="two ways"):
        ClusterSpec.parse(hosts=2, rate="100 mbps")


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("256KiB", 262144), ("1MB", 1000000), ("1500B", 1500), ("0.5MiB", 524288)]
)
def test_sizes(text, num_bytes):
    assert sizes.size(text, "--queue") == num_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"), [("1ms", 1e-3), ("250us", 2.5e-4), ("250 µs", 2.5e-4), ("2s", 2)]
)
def test_times(text, duration_s):
    assert q.seconds(text, "--delay") == pytest.approx(duration_s)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1e9, "1 Gbit/s"),
        (123.4e6, "123.4 Mbit/s"),
        (64e3, "64 kbit/s"),
        (0, "0 bit/s"),
        (999.96e6, "1 Gbit/s"),
    ],
)
def test_rates_are_shown_in_the_largest_unit(value, shown):
    assert q.show_rate(value) == shown


def test_one_value_serves_all_hosts_and_a_list_each():
    spec = ClusterSpec.parse(hosts=3, rate="1Gbit", loss="0%,1%,0.5%", cpu="100%,50%,25%")
    assert spec.rate_bits_per_s == spec.port_rate_bits_per_s == (1e9, 1e9, 1e9)
    assert spec.loss_ratio == (0, 0.01, 0.005)
    assert spec.cores == (1, 0.5, 0.25)


def test_hosts_may_have_unequal_numbers_of_ranks():
    mixed, alike = (
        ClusterSpec.parse(hosts=3, ranks_per_host="4,2,1"),
        ClusterSpec.parse(hosts=3, ranks_per_host=2),
    )
    assert (mixed.ranks_per_host, mixed.num_ranks, mixed.shape) == ((4, 2, 1), 7, "4+2+1")
    assert (alike.ranks_per_host, alike.num_ranks, alike.shape) == ((2, 2, 2), 6, "3x2")
    assert ClusterSpec.from_json(mixed.to_json()) == mixed


def test_ports_follow_unequal_rates_unless_they_are_given():
    assert ClusterSpec.parse(hosts=2, rate="1Gbit,10Mbit").port_rate_bits_per_s == (1e9, 1e7)
    assert ClusterSpec.parse(hosts=2, rate="1Gbit,10Mbit", port_rate="1Mbit").port_rate_bits_per_s == (
        1e6,
        1e6,
    )


@pytest.mark.parametrize(
    ("words", "offload"),
    [
        ({}, True),
        ({"rate": "1Gbit"}, True),
        ({"rate": "100Mbit"}, False),
        ({"rate": "1Gbit", "loss": "0.1%"}, False),
        ({"rate": "1Gbit", "priority": True}, False),
        ({"rate": "1Gbit", "mark": "60KB"}, False),
        ({"rate": "100Mbit", "offload": True}, True),
        ({"rate": "1Gbit", "offload": False}, False),
    ],
)
def test_offload_is_off_where_single_packets_matter_or_cost_little(words, offload):
    assert ClusterSpec.parse(hosts=2, **words).offload is offload


def test_hosts_are_spread_over_the_racks_evenly_and_in_order():
    spec = ClusterSpec.parse(hosts=7, racks=3)
    assert [spec.rack_of(host) for host in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_a_spec_survives_json():
    spec = ClusterSpec.parse(hosts=2, rate="1Gbit,10Mbit", loss="1%", delay="1ms", mark="30KB", racks=2)
    assert ClusterSpec.from_json(spec.to_json()) == spec


def test_the_description_holds_what_shapes_a_measurement():
    rows = dict(ClusterSpec.parse(hosts=2, rate="1Gbit", loss="0.1%", min_rto="5ms", delay="1ms").describe())
    assert rows["rate"] == "1 Gbit/s"
    assert rows["loss"] == "0.1 %"
    assert rows["delay, one way"] == "1 ms"
    assert rows["TCP"] == "cubic, smallest retransmission timeout 5 ms"
    assert rows["MTU"] == "1500 B, segmentation offload off"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"hosts": 0}, "--hosts 0 is not possible"),
        ({"hosts": 201}, "from 1 to 200"),
        ({"ranks_per_host": 0}, "--ranks-per-host 0 is not possible"),
        ({"loss": "200%"}, "--loss 200% is not possible"),
        ({"loss": "-1%"}, "--loss -1% is not possible"),
        ({"loss": "0.1"}, "--loss 0.1 has no unit"),
        ({"loss": "0.1x"}, "has no percent sign. Pass a percentage, for example --loss 0.1%"),
        ({"rate": "100"}, "--rate 100 has no unit. Pass a rate such as 1Gbit"),
        ({"rate": "100MB"}, "--rate 100MB has an unknown unit. Use kbit, Mbit or Gbit"),
        ({"rate": "fast"}, "--rate 'fast' is not a rate"),
        ({"rate": "0Mbit"}, "cannot be emulated"),
        ({"rate": "nanMbit"}, "is not a rate"),
        ({"rate": "1e999Mbit"}, "is not a rate"),
        ({"rate": "1Mbit,2Mbit,3Mbit"}, "holds 3 values for 2 host(s)"),
        ({"cpu": "0%"}, "--cpu 0% is not possible. 100% is one core"),
        ({"queue": "1KB"}, "--queue 1000B holds no packet"),
        ({"queue": "32KB"}, "one is up to 65664 bytes here (MTU 1500, offload on)"),
        ({"mtu": 100}, "--mtu 100 is not possible"),
        ({"delay": "1"}, "--delay 1 has no unit"),
        ({"delay": "11s", "rate": "1Mbit"}, "--delay 11s is not possible"),
        ({"delay": "1ms"}, "--delay also needs --rate"),
        ({"jitter": "1ms"}, "--jitter 1 ms is larger than the delay"),
        ({"mark": "10KB"}, "--mark needs a rate"),
        ({"mark": "1MB", "rate": "1Mbit"}, "--mark 1000000B is not within the queue of 262144 bytes"),
        ({"priority": True}, "--priority needs a rate"),
        ({"racks": 3}, "--racks 3 is not possible"),
        ({"uplink": "1Mbit"}, "pass --racks 2 or more"),
        ({"links": 0}, "--links 0 is not possible"),
        ({"loss": "1%", "offload": True}, "--loss and --offload do not go together"),
        ({"congestion_control": "cu bic"}, "is not the name of one"),
        ({"min_rto": "1us"}, "--min-rto"),
    ],
)
def test_what_cannot_be_is_refused_in_the_options_own_words(words, says):
    with pytest.raises(ConfigurationError) as refused:
        ClusterSpec.parse(**({"hosts": 2} | words))
    assert says in str(refused.value)


def test_each_class_may_have_a_drop_threshold():
    """One value serves all class selectors, eight are one each; others are refused, as is one above the queue."""
    one = ClusterSpec.parse(hosts=2, rate="1Mbit", drop="10KB")
    each = ClusterSpec.parse(hosts=2, rate="1Mbit", drop="1KB, 2KB,3KB,4KB,5KB,6KB,7KB,8KB")
    assert one.drop_limits() == (10_000,) * 8
    assert each.drop_limits() == tuple(range(1000, 9000, 1000))
    assert ClusterSpec.from_json(each.to_json()) == each
    assert ("drops not-ECN above", "9.766 KiB") in one.describe()
    with pytest.raises(ConfigurationError, match=r"holds 2 values. Pass one, or 8"):
        ClusterSpec.parse(hosts=2, rate="1Mbit", drop="10KB,20KB")
    with pytest.raises(ConfigurationError, match="not within the queue"):
        ClusterSpec.parse(hosts=2, rate="1Mbit", drop="1KB,2KB,3KB,4KB,5KB,6KB,7KB,8MB")
