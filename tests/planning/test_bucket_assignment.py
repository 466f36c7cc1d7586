"""Which gradients travel together: the planning function against the paper's table, torch's rule and its own."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.gradient_group import on_one_host
from paceline.planning.bucket_assignment import BucketCaps, GradientSpec, assign_buckets

MEBIBYTE = 1024 * 1024
FIRST_BUCKET_BYTES = MEBIBYTE


def plan_buckets(sizes_bytes, caps_bytes):
    """Buckets of gradients of one key, taken in the given order."""
    specs = [GradientSpec(size, key=None) for size in sizes_bytes]
    return assign_buckets(specs, range(len(specs)), BucketCaps(tuple(caps_bytes)))


def resnet50_num_elements():
    """Elements of ResNet-50's 161 parameters in registration order (He et al. 2016, table 1, with torch's biases)."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    channels = 64
    for width, num_blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(num_blocks):
            sizes += [width * channels, width, width]
            sizes += [width * width * 9, width, width]
            sizes += [4 * width * width, 4 * width, 4 * width]
            if block == 0:
                sizes += [4 * width * channels, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 1000 * 2048, 1000]


def mebibytes(plan, sizes):
    return [round(sum(sizes[index] for index in bucket) / MEBIBYTE, 1) for bucket in plan]


def caps(cap_mb):
    """The paper's first bucket of 1 MiB, then the cap; below that the cap holds for the first as well."""
    return [min(FIRST_BUCKET_BYTES, cap_mb * MEBIBYTE), cap_mb * MEBIBYTE]


def initial_plan(sizes, cap_mb):
    """Torch's first assignment: planned in registration order, then the list of buckets reversed."""
    return plan_buckets(sizes, caps(cap_mb))[::-1]


def rebuilt_plan(sizes, cap_mb):
    """Planned in the order in which backward makes gradients ready."""
    return plan_buckets(sizes[::-1], caps(cap_mb))


def test_resnet50_has_the_papers_tensors():
    """The list that the table is computed from has the printed numbers of tensors and parameters."""
    sizes = resnet50_num_elements()
    assert len(sizes) == 161
    assert sum(sizes) == 25_557_032


@pytest.mark.parametrize(
    ("cap_mb", "num_initial", "num_rebuilt"),
    [(0, 161, 161), (1, 35, 35), (5, 13, 13), (10, 10, 9), (25, 5, 5), (50, 3, 3)],
)
def test_number_of_buckets_of_resnet50(cap_mb, num_initial, num_rebuilt):
    """Every row of the table: how many buckets a capacity gives, before and after the rebuild."""
    sizes = [4 * num for num in resnet50_num_elements()]
    assert len(initial_plan(sizes, cap_mb)) == num_initial
    assert len(rebuilt_plan(sizes, cap_mb)) == num_rebuilt


@pytest.mark.parametrize(
    ("cap_mb", "initial", "rebuilt"),
    [
        (25, [11.8, 30.0, 28.3, 25.8, 1.5], [7.8, 30.0, 25.0, 25.3, 9.3]),
        (50, [41.9, 54.1, 1.5], [7.8, 55.1, 34.6]),
    ],
)
def test_bucket_sizes_of_resnet50(cap_mb, initial, rebuilt):
    """The table's sizes in MiB, in the order in which the buckets are reduced."""
    sizes = [4 * num for num in resnet50_num_elements()]
    assert mebibytes(initial_plan(sizes, cap_mb), sizes) == initial
    assert mebibytes(rebuilt_plan(sizes, cap_mb), sizes[::-1]) == rebuilt


SIZES = st.lists(st.integers(0, 200), max_size=40)
CAPS = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@given(SIZES, CAPS)
def test_a_plan_is_a_partition_in_order(sizes, caps_bytes):
    """Every gradient is in exactly one bucket, and reading the buckets gives the order that went in."""
    plan = plan_buckets(sizes, caps_bytes)
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    assert all(plan)


@given(SIZES, CAPS)
def test_a_bucket_is_closed_by_the_gradient_that_fills_it(sizes, caps_bytes):
    """Every bucket but the last reaches its cap with its last gradient, not before; the last cap repeats."""
    plan = plan_buckets(sizes, caps_bytes)
    for number, bucket in enumerate(plan):
        cap = caps_bytes[min(number, len(caps_bytes) - 1)]
        assert sum(sizes[index] for index in bucket[:-1]) < cap or len(bucket) == 1
        if bucket is not plan[-1]:
            assert sum(sizes[index] for index in bucket) >= cap


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 400), st.integers(1, 400))
def test_plan_is_torchs_for_one_dtype(num_elements, first_bytes, cap_bytes):
    """For one (dtype, device) torch's own function cuts the same buckets."""
    tensors = [torch.empty(num) for num in num_elements]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first_bytes, cap_bytes])
    assert plan_buckets([4 * num for num in num_elements], [first_bytes, cap_bytes]) == theirs


@pytest.mark.parametrize(
    ("size_mb", "on_cpu", "on_one_host", "later_cap_mb"),
    [
        (102, False, True, 25),
        (102, False, False, 25),
        (102, True, True, 25),
        (1, True, False, 1),
        (48, True, False, 4),
        (96, True, False, 8),
        (240, True, False, 20),
        (1300, True, False, 25),
    ],
)
def test_default_caps(size_mb, on_cpu, on_one_host, later_cap_mb):
    """1 MiB first, then 25 as in the paper on an accelerator; less, from the end, where CPUs have a network between."""
    caps = BucketCaps.default(size_mb * MEBIBYTE, any_on_cpu=on_cpu, on_one_host=on_one_host, num_ranks=2)
    assert caps.from_end == (on_cpu and not on_one_host)
    assert caps.caps_bytes == (FIRST_BUCKET_BYTES // (1 + caps.from_end), later_cap_mb * MEBIBYTE)
    assert BucketCaps.from_arguments(None, None) is None


@pytest.mark.parametrize(
    ("size_mb", "num_ranks", "cap_mb"),
    [(12, 2, 1), (12, 4, 1), (12, 8, 4), (240, 8, 20), (60, 16, 8), (60, 256, 25)],
)
def test_more_ranks_have_larger_buckets_between_hosts(size_mb, num_ranks, cap_mb):
    """Half a MiB a rank beyond 4, up to 25 MiB, as a reduction costs twice the rounds among twice the ranks."""
    caps = BucketCaps.default(size_mb * MEBIBYTE, any_on_cpu=True, on_one_host=False, num_ranks=num_ranks)
    assert caps.caps_bytes == (MEBIBYTE // 2, cap_mb * MEBIBYTE)


def test_caps_with_forward_overlap_are_finer():
    """The next forward waits for whole buckets: a 48th, at most 5 MiB; no smaller first ones."""
    for size_mb, num_ranks, cap_mb in ((48, 4, 1), (96, 4, 2), (1300, 4, 5), (96, 8, 4), (1300, 16, 8)):
        caps = BucketCaps.default(size_mb * MEBIBYTE, True, False, num_ranks, overlaps_forward=True)
        assert caps == BucketCaps((MEBIBYTE // 2, cap_mb * MEBIBYTE), from_end=True)


def between_hosts(sizes_bytes):
    """The default buckets of gradients that become ready in this order, on CPUs of several hosts."""
    specs = [GradientSpec(size, key=None) for size in sizes_bytes]
    caps = BucketCaps.default(sum(sizes_bytes), any_on_cpu=True, on_one_host=False, num_ranks=4)
    return assign_buckets(specs, range(len(specs)), caps)


def test_between_hosts_the_first_buckets_and_the_last_are_small():
    """The wire starts early, and next to nothing is left to send at the end; a bucket exceeds no twelfth by much."""
    sizes = [4 * num for num in resnet50_num_elements()][::-1]
    plan = between_hosts(sizes)
    assert len(plan) == 9  # a bucket exceeds its cap by a gradient, so they are fewer than 12
    assert mebibytes(plan, sizes)[-1] == 0.5
    layers = between_hosts([MEBIBYTE] * 96)
    assert [len(bucket) for bucket in layers] == [1, 2, 4, *[8] * 11, 1]


def test_what_remains_between_hosts_is_hidden_by_backward():
    """Nothing hides what is ready last, so next to nothing is no bucket of its own there: an mLSTM's last gradients."""
    mlstm = [70_000, 15_800_000, 300_000, 4_000_000, 60_000, 4_000, 4_000]
    assert between_hosts(mlstm) == [[0, 1, 2], [3, 4, 5, 6]]
    large_head = [600_000, *mlstm[1:]]
    assert between_hosts(large_head) == [[0], [1, 2], [3, 4, 5, 6]]


@given(SIZES, CAPS, st.integers(1, 60))
def test_a_bucket_has_no_more_bytes_than_all_before_it(sizes, caps_bytes, least):
    """From the end, but for one gradient, and for a few bytes; a small remainder has joined bucket 1."""
    specs = [GradientSpec(size, key=None) for size in sizes]
    caps = BucketCaps(tuple(caps_bytes), from_end=True, least_bytes=least)
    plan = assign_buckets(specs, range(len(specs)), caps)
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    for bucket in plan[1:]:
        before = sum(sizes[: bucket[0] + 1])
        assert sum(sizes[index] for index in bucket[1:]) < max(before, least)


@given(SIZES, CAPS)
def test_a_plan_from_the_end_is_a_partition_in_order(sizes, caps_bytes):
    """Buckets reach their caps with their first gradients, the first bucket perhaps not, or with a remainder before."""
    specs = [GradientSpec(size, key=None) for size in sizes]
    plan = assign_buckets(specs, range(len(specs)), BucketCaps(tuple(caps_bytes), from_end=True))
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(plan[::-1]):
        cap = caps_bytes[min(number, len(caps_bytes) - 1)]
        total = sum(sizes[index] for index in bucket)
        if bucket is not plan[0]:
            assert total >= cap
            assert total - sizes[bucket[0]] < cap or len(bucket) == 1
        elif number:
            assert 2 * total >= cap  # less would have joined the next one


def test_two_dtypes_from_the_end():
    """Caps count for each; buckets are in the order in which they become full."""
    specs = [GradientSpec(2, key=key) for key in "aabbab"]
    caps = BucketCaps((2, 4), from_end=True)
    assert assign_buckets(specs, range(6), caps) == [[0, 1], [2, 3], [4], [5]]


@pytest.mark.parametrize(
    ("local_ranks", "ranks", "master", "expected"),
    [
        ("2", "2", "box", True),
        ("2", "4", "localhost", False),
        (None, None, "localhost", True),
        (None, "2", "127.0.0.1", True),
        (None, None, "box", None),
        (None, None, None, None),
    ],
)
def test_the_launcher_says_how_many_hosts(monkeypatch, local_ranks, ranks, master, expected):
    """By torchrun's variables first; else a master on the loopback interface can only have ranks here."""
    for name, value in (("LOCAL_WORLD_SIZE", local_ranks), ("WORLD_SIZE", ranks), ("MASTER_ADDR", master)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert [on_one_host(unknown) for unknown in (True, False)] == (
        [True, False] if expected is None else [expected] * 2
    )
