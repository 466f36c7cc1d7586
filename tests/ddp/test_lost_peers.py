"""A peer that dies, hangs or leaves: everyone else raises within the group's timeout, names it, and can exit."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import Mlp, digest, generator, random_batch, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel
from paceline.comm.peers import Peers, next_name
from paceline.errors import PeerLostError

pytestmark = pytest.mark.processes

GROUP_TIMEOUT_S = 60.0  # who is dead is named long before
STOPPED_TIMEOUT_S = 6.0  # that passes where the other is not dead
DEADLINE_S = 100.0


def build(seed):
    torch.manual_seed(seed)
    return DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005)


def fail_in(rank, _num_ranks, seed, victim, how, where):
    """Two good steps, then `victim` is killed, stopped or leaves; returns the error that a survivor got."""
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def strike(*_):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    before = None
    try:
        for step in range(4):
            if step == 2:
                before = digest(list(model.parameters()))
                if rank == victim and how == "leave":
                    return "left"
                if rank == victim and how == "exit":
                    os._exit(7)
                if rank == victim and where == "backward":
                    model.module.layers[1].weight.register_hook(strike)
                if rank == victim and where == "forward":
                    model.module.layers[1].register_forward_hook(strike)
                if rank == victim and where == "end of backward":
                    model.module.layers[0].weight.register_post_accumulate_grad_hook(strike)
            optimizer.zero_grad()
            squares(model(random_batch(seed, step, rank))).backward()
            optimizer.step()
    except RuntimeError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, str(error), digest(list(model.parameters())) == before
    return "no error"


def check(outcomes, victim, how):
    for outcome in outcomes:
        if outcome.rank == victim:
            if how == "kill":
                assert outcome.exit_code == -signal.SIGKILL, outcome.story()
            elif how == "exit":
                assert outcome.exit_code == 7, outcome.story()
            elif how == "stop":
                assert outcome.missed_deadline, outcome.story()
            continue
        assert outcome.clean, outcome.story()
        assert outcome.value != "no error"
        kinds, message, untouched = outcome.value
        assert "PeerLostError" in kinds, outcome.value
        assert "TimeoutError" in kinds
        assert "RuntimeError" in kinds
        assert untouched, "parameters changed"
        verdict = message.partition("The backend said")[0]  # which may quote others
        named = {r for r in range(len(outcomes)) if r != outcome.rank and f"rank {r} " in verdict}
        assert named == {victim}, message
        assert ("is stopped" in verdict) == (how == "stop"), message


@pytest.mark.parametrize(
    ("num_ranks", "victim", "where", "store"),
    [
        (2, 0, "backward", "file"),
        (2, 1, "backward", "tcp"),
        (2, 1, "forward", "file"),
        (2, 0, "end of backward", "tcp"),
        (4, 2, "backward", "tcp"),
        (4, 0, "forward", "tcp"),
        (4, 3, "end of backward", "file"),
    ],
)
def test_a_killed_peer_is_named(num_ranks, victim, where, store):
    """SIGKILL in mid-step: every survivor raises PeerLostError that names the victim and nobody else."""
    with Ranks(num_ranks, group_timeout_s=GROUP_TIMEOUT_S, store=store) as ranks:
        outcomes = ranks.outcomes(fail_in, 1, victim, "kill", where, deadline_s=DEADLINE_S)
        check(outcomes, victim, "kill")


@pytest.mark.slow
def test_a_stopped_peer_is_named_at_the_timeout():
    """SIGSTOP: the others raise when the group's timeout has passed, naming the rank that hangs."""
    with Ranks(3, group_timeout_s=STOPPED_TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(fail_in, 2, 0, "stop", "backward", deadline_s=DEADLINE_S)
        check(outcomes, 0, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "exit"])
def test_a_peer_that_leaves_early_is_named(how):
    """A rank with fewer steps, or one that exits: the others raise within the timeout instead of hanging."""
    with Ranks(2, group_timeout_s=STOPPED_TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(fail_in, 3, 1, how, "", deadline_s=DEADLINE_S)
        check(outcomes, 1, how)


def run_backwards(rank, _num_ranks, numbers):
    """Run so many backwards; who has run all then waits until another rank has given up."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp())
    store = dist.distributed_c10d._get_default_store()
    try:
        for step in range(numbers[rank]):
            squares(model(random_batch(4, step, rank))).backward()
    except PeerLostError as error:
        store.set("gave up", b"")
        return str(error)
    store.wait(["gave up"])
    return ""


@pytest.mark.slow
def test_ranks_with_different_numbers_of_backwards_are_told_them():
    """As with LBFGS, whose closure runs as often as a rank's own loss asks for."""
    with Ranks(2, group_timeout_s=STOPPED_TIMEOUT_S) as ranks:
        first, second = ranks.run(run_backwards, (3, 2), deadline_s=DEADLINE_S)
    assert (
        "is running but does not answer (after 2 synchronized backwards, while rank 0 is in number 3)"
        in first
    )
    assert not second


def dead_in_constructor(rank, num_ranks, seed, victim):
    torch.manual_seed(seed)
    # Gloo refuses the group to whoever still connects when a rank dies that has already connected.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} has its group", b"")
    store.wait([f"rank {other} has its group" for other in range(num_ranks)])
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        DistributedDataParallel(Mlp())
    except RuntimeError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return "no error"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_before_wrapping(victim):
    """The constructor raises PeerLostError too."""
    with Ranks(2, group_timeout_s=GROUP_TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(dead_in_constructor, 4, victim, deadline_s=DEADLINE_S)
        survivor = outcomes[1 - victim]
        assert survivor.clean, survivor.story()
        kinds, message = survivor.value
        assert "PeerLostError" in kinds, survivor.value
        assert f"rank {victim} " in message


def after_the_loss(rank, _num_ranks, seed, victim):
    """What a survivor gets that tries to go on."""
    model = build(seed)
    errors = []
    for step in range(3):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            squares(model(random_batch(seed, step, rank))).backward()
        except RuntimeError as error:
            errors.append(type(error).__name__)
    with torch.no_grad():
        output = model(random_batch(seed, 9))
    return errors, bool(output.isfinite().all())


def test_going_on_after_a_loss_is_refused_at_once():
    """After a loss every further step raises immediately, while evaluation still works."""
    with Ranks(2, group_timeout_s=GROUP_TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(after_the_loss, 5, 1, deadline_s=DEADLINE_S)
        errors, can_evaluate = outcomes[0].value
        assert errors[0] == "PeerLostError"
        assert len(errors) == 3
        assert can_evaluate


def hang_with_buffers(rank, _num_ranks, seed, victim):
    from harness.models import conv_net

    torch.manual_seed(seed)
    model = DistributedDataParallel(conv_net())
    x = torch.randn(2, 3, 8, 8, generator=generator(seed, rank))
    squares(model(x)).backward()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        squares(model(x)).backward()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_lost_while_buffers_travel(victim):
    """The buffer broadcast before a forward fails with the same error."""
    with Ranks(2, group_timeout_s=GROUP_TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(hang_with_buffers, 6, victim, deadline_s=DEADLINE_S)
        survivor = outcomes[1 - victim]
        assert survivor.clean, survivor.story()
        name, message = survivor.value
        assert name == "PeerLostError"
        assert f"rank {victim} " in message


class Stuck:
    """A collective that fails where there is a reason, and else never ends."""

    def __init__(self, reason):
        self._reason = reason

    def wait(self, timeout_s=None):
        if self._reason:
            raise RuntimeError(self._reason)
        time.sleep(min(timeout_s, 0.05))
        return False


def waits(rank, _num_ranks):
    peers = Peers(dist.group.WORLD, next_name(dist.group.WORLD, is_collective=True), in_slices=True)
    with pytest.raises(PeerLostError) as caught:
        peers.wait(Stuck("a router drops what is long" if rank == 1 else ""), "waiting for bucket 0")
    return str(caught.value)


def test_all_ranks_hear_why_the_first_one_failed():
    """Only one sees the reason; it says so in failure detection, and who answers does not take its place."""
    others = pool(3).run(waits)
    for rank, message in enumerate(others):
        who, _, said = message.partition("The backend said: ")
        assert who.startswith(
            f"rank {rank} was waiting for bucket 0 when communication failed: every rank still answers."
        )
        assert "a router drops what is long" in said
        assert ("another rank has started failure detection (rank 1's backend said" in said) == (rank != 1)
        assert said.count("started failure detection") == (rank != 1), "quoted once"


def hook_that_raises(model, on):
    def hook(_, bucket):
        def give(future):
            if on:
                raise ValueError("a mistake in the hook")
            return future.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(give)

    model.register_comm_hook(None, hook)


def refuses(message):
    raise torch.linalg.LinAlgError(message)


def known_causes(rank, _num_ranks, how):
    """The error of a step that fails although every rank is there and the network carries all."""
    group = dist.new_group([0, 1], backend="paceline")  # which nobody uses afterwards
    model = DistributedDataParallel(
        nn.Linear(64, 64), process_group=group, compression="powersgd" if how == "algebra" else None
    )
    if "hook" in how:
        hook_that_raises(model, on=how == "every hook" or rank == 1)
    if how == "other collectives" and rank == 1:
        dist.all_reduce(torch.ones(7), group=group, async_op=True)
    if how == "destroyed":
        dist.barrier()
        dist.destroy_process_group(group)
    with pytest.MonkeyPatch.context() as patch:
        if how == "algebra" and rank == 1:
            patch.setattr(torch.linalg, "qr", lambda *_: refuses("the input is not finite"))
        try:
            squares(model(random_batch(1, 0, rank, shape=(4, 64)))).backward()
        except RuntimeError as error:
            return type(error).__name__, str(error)
        finally:
            dist.barrier()  # nobody is gone while another asks
    return "no error", ""


KNOWN = {
    "every hook": ("HookError", "HookError", "ValueError: a mistake in the hook"),
    "one hook": ("PeerLostError", "HookError", "ValueError: a mistake in the hook"),
    "algebra": ("PeerLostError", "_LinAlgError", "the input is not finite"),
    "other collectives": ("CollectiveMismatchError", "ProtocolError", "all-reduce number"),
    "destroyed": ("ProtocolError", "ProtocolError", "this process group has been destroyed"),
}


@pytest.mark.parametrize("how", KNOWN)
def test_a_cause_that_is_known_is_the_one_that_is_named(how):
    """A mistake in a hook, a local error, another collective: nobody says that a peer or the network was lost."""
    *kinds, cause = KNOWN[how]
    for kind, (found, message) in zip(kinds, pool(2).run(known_causes, how), strict=True):
        assert found == kind, message
        assert cause in message
        assert "network" not in message
        if found == "PeerLostError":
            assert "every rank still answers" in message
            assert f"rank 1 raised {kinds[1]}: " in message
