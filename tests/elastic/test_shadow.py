"""A shadow holds the bits of the last completed step, whoever dies; otherwise it knows that it does not."""

import os
import socket
import threading
import time
import types

import pytest
import torch

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic.agent_connection import ShadowOrders
from paceline.elastic.checkpoints import CheckpointFolder
from paceline.elastic.handover import Carried
from paceline.elastic.replay import Giver, Share
from paceline.elastic.rollback import TrainingPosition
from paceline.elastic.shadow import Shadow, _Stream
from paceline.elastic.shared_memory import SharedMemory
from paceline.errors import ConfigurationError, ReplicaMismatchError

BATCH = GlobalBatch((4, 4))


def training():
    """A model with batch normalisation, two optimizers and a schedule; the same at each call."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
        torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9),
    ]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, gamma=0.7)
    sampler = GlobalShuffle(800, BATCH, 0)
    carried = Carried(model, optimizers, [schedule], sampler)
    return types.SimpleNamespace(
        model=model, optimizers=optimizers, schedule=schedule, carried=carried, step=0, givers=[]
    )


def train(it):
    """A step with the same samples on each rank, as reduced gradients are the same."""
    torch.manual_seed(it.step)
    it.model(torch.randn(8, 5)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.5)
    for optimizer in it.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    it.schedule.step()
    it.step += 1


class Job:
    """Ranks, and a shadow that follows them in a thread."""

    def __init__(self, folder, num_ranks=3, write_every_s=1000.0, pair=socket.socketpair):
        self.pair = pair
        self.ranks = [training() for _ in range(num_ranks)]
        self.ranks[0].carried.seeds = ((1, 2, 3), (4, 5, 6))
        self.followed = training()
        orders = ShadowOrders(str(folder), 3, write_every_s, "none")
        self.folder = CheckpointFolder(folder, "a card")
        self.folder.open()
        self.shadow = Shadow(self.followed.carried, self.folder, orders)
        self.failed = []

    def begin(self, ranks=None):
        """Let the shadow follow these ranks: a membership."""
        self.members = self.ranks if ranks is None else ranks
        pairs = [self.pair() for _ in self.members]
        for index, (rank, pair) in enumerate(zip(self.members, pairs, strict=True)):
            rank.givers = [Giver(pair[0], rank.carried, Share(index, len(pairs)))]

        def follow():
            try:
                self.shadow.follow()
            except Exception as error:
                self.failed.append(error)

        self.shadow.begin([theirs for _, theirs in pairs])
        self.thread = threading.Thread(target=follow, daemon=True)
        self.thread.start()

    def turn(self, rank):
        position = TrainingPosition(rank.step, 0, rank.step * 8)
        for giver in rank.givers:
            giver.go_on(position, BATCH)

    def train(self, num_steps):
        for _ in range(num_steps):
            for rank in self.members:
                self.turn(rank)
            for rank in self.members:
                rank.givers[0].drain()
                train(rank)

    def end(self):
        for rank in self.members:
            for giver in rank.givers:
                giver.end(TrainingPosition(rank.step, 0, rank.step * 8), BATCH)
        self.thread.join(30)
        assert not self.thread.is_alive()

    def kill(self, rank):
        """As the kernel does: what it has not sent, it never sends."""
        for giver in rank.givers:
            giver._post({"mark": torch.zeros(1)})  # bytes, behind which all frames are sent
            giver.drain()
            giver._end.shutdown(socket.SHUT_RDWR)
            giver.leave()

    def is_equal(self, step):
        """Whether the shadow holds the bits of this step, all of them."""
        own, rank = self.shadow, self.ranks[0]
        assert own.is_whole
        assert own.step == step == rank.step
        own.finish()
        tree = self.folder.load(self.folder.newest())
        resumed = training()
        torch.manual_seed(99)
        resumed.carried.take(tree, is_new=True)
        assert resumed.carried.seeds == ((1, 2, 3), (4, 5, 6))
        assert tree["position"] == [step, 0, step * 8]
        assert resumed.schedule.state_dict() == rank.schedule.state_dict()
        assert all(map(torch.equal, resumed.model.buffers(), rank.model.buffers()))
        return resumed.carried.digest() == self.followed.carried.digest() == rank.carried.digest()


def test_it_follows_while_others_train_and_writes_the_last_step(tmp_path, capfd):
    """Two optimizers, clipped gradients, a schedule, buffers and random numbers."""
    job = Job(tmp_path)
    for rank in job.ranks:
        train(rank)
    job.begin()
    job.train(9)
    job.end()
    assert not job.failed
    assert job.is_equal(10)
    assert len([*tmp_path.glob("step-*")]) == 2  # one as soon as it follows
    assert "follows the training from step" in capfd.readouterr().err


def over_tcp():
    """A connection as between two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


@pytest.mark.parametrize(
    ("pair", "confirms", "num_shared"),
    [(socket.socketpair, True, 18), (socket.socketpair, False, 0), (over_tcp, True, 0)],
)
def test_gradients_are_in_shared_memory_on_one_host(tmp_path, monkeypatch, pair, confirms, num_shared):
    """Two optimizers' for nine steps. The socket takes them between hosts, and where the shadow confirms nothing."""
    job, put, found = Job(tmp_path, num_ranks=1, pair=pair), SharedMemory.put, []

    def noted(*words):
        found.append(put(*words))
        return found[-1]

    monkeypatch.setattr(SharedMemory, "put", noted)
    if not confirms:
        monkeypatch.setattr(_Stream, "confirm", lambda *_: None)
    train(job.ranks[0])
    job.begin()
    job.train(1)
    while not job.shadow.is_whole:  # it follows from here on: what is confirmed does not depend on its speed
        job.train(1)
    found.clear()
    for step in range(job.ranks[0].step, 9 + job.ranks[0].step):
        job.train(1)
        while confirms and job.shadow.step < step:
            time.sleep(0.001)
    job.end()
    assert job.is_equal(job.ranks[0].step)
    assert sum(each is not None for each in found) == num_shared


def test_what_is_in_shared_memory_stays_until_it_is_confirmed():
    """Also empty tensors, and those with gaps; beyond the memory is an error."""
    here, there = socket.socketpair()
    with here, there:
        memory = SharedMemory.sent(here, b"words", [20, 8])
        words, (descriptor,), *_ = socket.recv_fds(there, 99, 1)
    theirs, first = SharedMemory(descriptor), [torch.arange(5.0), torch.ones(0), torch.arange(8)[::2][:2]]
    begin = memory.put(first, 3, confirmed=-1)
    assert (words, memory.put([torch.ones(5)], 4, -1) is not None) == (b"words", True)
    assert memory.put([torch.ones(5)], 5, confirmed=2) is None
    assert all(map(torch.equal, theirs.at(begin, first), first))
    assert memory.put([torch.ones(5)], 5, confirmed=3) == begin
    assert memory.put([torch.ones(4096)], 5, confirmed=3) is None  # no room
    assert torch.equal(theirs.at(begin, first)[0], torch.ones(5))
    with pytest.raises(ValueError, match="offset"):
        theirs.at(1 << 20, first)
    os.close(descriptor)


def test_it_goes_on_with_fewer_ranks_without_a_snapshot(tmp_path, capfd):
    """A rank is lost between two steps. The others' shares are cut anew."""
    job = Job(tmp_path)
    job.begin()
    job.train(4)
    job.kill(job.ranks[2])
    job.end()
    assert job.shadow.step == 4
    job.begin(job.ranks[:2])
    job.train(3)
    job.end()
    assert job.is_equal(7)
    assert "snapshot" not in capfd.readouterr().err


def test_it_is_whole_again_if_one_giver_begins_a_step_after_the_others(tmp_path, capfd):
    """The first giver has begun behind the step that the shadow holds, so it sends no snapshot by itself."""
    job = Job(tmp_path)
    job.begin()
    job.train(4)
    job.end()
    job.begin()
    late = job.ranks[2].givers
    job.ranks[2].givers = []
    for rank in job.ranks:
        job.turn(rank)
    for rank in job.ranks:
        train(rank)
    job.ranks[2].givers = late
    job.train(5)
    job.end()
    assert job.is_equal(10)
    assert "fell behind after step 4" in capfd.readouterr().err


def test_a_rank_that_dies_behind_its_gradients_costs_nothing(tmp_path):
    """Of its last step only the turn is missing, which the others have sent."""
    job = Job(tmp_path)
    job.begin()
    job.train(4)
    for rank in job.ranks:
        job.turn(rank)
    for rank in job.ranks:
        train(rank)
    job.kill(job.ranks[1])
    job.end()
    assert job.is_equal(5)


def test_a_share_that_is_missing_leaves_the_step_before(tmp_path, capfd):
    """All others have completed the step; the shadow writes what it has, and takes a new snapshot."""
    job = Job(tmp_path)
    job.begin()
    job.train(4)
    for rank in job.ranks:
        job.turn(rank)
    job.kill(job.ranks[1])
    for rank in job.ranks:
        train(rank)
    job.end()
    assert (job.shadow.step, job.shadow.is_whole) == (4, True)
    job.begin(job.ranks[:1])
    job.train(4)
    job.end()
    assert job.is_equal(9)
    assert (tmp_path / "step-000000004").exists()
    assert "fell behind after step 4" in capfd.readouterr().err


def test_a_step_that_one_rank_has_completed_and_others_give_up_is_not_applied(tmp_path):
    """Their loops call `optimizer.step()` without gradients, before they are killed, too."""
    job = Job(tmp_path)
    job.begin()
    job.train(4)
    for rank in job.ranks:
        job.turn(rank)
    train(job.ranks[0])
    job.turn(job.ranks[0])
    for rank in job.ranks[1:]:
        for optimizer in rank.optimizers:
            optimizer.step()
        job.kill(rank)
    job.end()
    assert (job.shadow.step, job.shadow.is_whole) == (4, True)
    assert job.followed.carried.digest() == job.ranks[1].carried.digest()


def test_a_shadow_that_does_not_read_takes_a_new_snapshot(tmp_path, monkeypatch, capfd):
    """No giver waits for it, and what waits to be read is bounded."""
    job, follows, goes_on = Job(tmp_path), threading.Event(), threading.Event()
    apply = job.shadow._apply

    def applying(*given):
        apply(*given)
        if job.shadow.is_whole:
            follows.set()
            goes_on.wait(30)

    monkeypatch.setattr(job.shadow, "_apply", applying)
    monkeypatch.setattr("paceline.elastic.replay._DRAIN_S", 0.01)
    job.begin()
    for rank in job.ranks:
        rank.givers[0]._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    while not follows.is_set():
        job.train(1)
    monkeypatch.setattr("paceline.elastic.replay._LEAST_BYTES", 20_000)
    while not all(rank.givers[0]._is_behind for rank in job.ranks):
        job.train(1)
    most = max(rank.givers[0]._posted - rank.givers[0]._sent for rank in job.ranks)
    assert most <= 2 * job.ranks[0].givers[0]._total + 20_000
    goes_on.set()
    monkeypatch.setattr("paceline.elastic.replay._DRAIN_S", 0.5)
    job.train(20)
    job.end()
    assert not job.failed
    assert job.is_equal(job.ranks[0].step)
    assert "fell behind" in capfd.readouterr().err


def test_words_that_wait_are_bounded_as_tensors_are(monkeypatch):
    """A schedule has long words, and no shadow reads."""
    monkeypatch.setattr("paceline.elastic.replay._LEAST_BYTES", 100_000)
    it, (here, there) = training(), socket.socketpair()
    monkeypatch.setattr(it.schedule, "state_dict", lambda: {"words": "x" * 1_000_000})
    it.givers = [Giver(here, it.carried, Share(0, 1))]
    with there:
        for _ in range(2):
            Job.turn(None, it)
        assert it.givers[0]._is_behind


def test_it_is_whole_again_only_with_a_snapshot_of_a_share_that_fell_behind(tmp_path, capfd):
    """One giver drops three steps, and the others' come before its snapshot. So each says "whole" with right bits."""
    job, digests, said = Job(tmp_path), {}, []
    job.shadow._says_whole = lambda is_whole: said.append(
        (is_whole, job.shadow.step, job.followed.carried.digest())
    )

    def train(num_steps):
        for _ in range(num_steps):
            job.train(1)
            digests[job.ranks[0].step] = job.ranks[0].carried.digest()

    job.begin()
    train(4)
    late = job.ranks[1].givers[0]
    while late._sent < late._posted:
        late.drain()
    late._is_behind, late._turn = True, lambda *_: None
    train(3)
    del late._turn
    train(6)
    job.end()
    assert job.is_equal(13)
    assert [is_whole for is_whole, _, _ in said] == [True, False, True]
    assert all(digests[step] == digest for is_whole, step, digest in said if is_whole)
    assert capfd.readouterr().err.count("fell behind after step 3: step 4 did not come from all ranks") == 1


@pytest.mark.parametrize("at_once", [1 << 17, 4])
def test_one_bit_that_differs_is_named(tmp_path, monkeypatch, capfd, at_once):
    """Also if a parameter has several digests. Then it takes a new snapshot. A script that goes on so is refused."""
    monkeypatch.setattr("paceline.elastic.replay._DIGEST_NUMBERS", at_once)
    job = Job(tmp_path, num_ranks=2)
    job.begin()
    job.train(3)
    for rank in job.ranks:
        with torch.no_grad():
            rank.model[2].bias[1].nextafter_(torch.tensor(9.0))
    job.train(30)
    job.end()
    assert job.is_equal(33)
    assert "error: 2.bias, or its state in the optimizer, has other bits" in capfd.readouterr().err
    job.begin()
    while not job.failed:
        for rank in job.ranks:
            with torch.no_grad():
                rank.model[2].bias[1].nextafter_(torch.tensor(9.0))
        job.train(1)
    job.end()
    assert isinstance(job.failed[0], ReplicaMismatchError)
    assert "cannot follow: 2.bias" in str(job.failed[0])


def test_it_says_how_much_memory_it_needs(tmp_path, monkeypatch):
    """Before it takes the snapshot."""
    monkeypatch.setattr("paceline.elastic.shadow.available_bytes", lambda: 100.0)
    job = Job(tmp_path)
    job.begin()
    job.train(1)
    job.end()
    with pytest.raises(ConfigurationError, match=r"needs [\d,]+ bytes, and 100 are free"):
        raise job.failed[0]


def test_training_on_an_accelerator_is_refused():
    """The ranks say so, also to a shadow whose script found no accelerator on its own host."""
    it, (here, there) = training(), socket.socketpair()
    it.model.to("meta")
    giver = Giver(here, it.carried, Share(0, 1))
    shadow = Shadow(
        training().carried, CheckpointFolder("unused", "a card"), ShadowOrders("unused", 3, 9.0, "none")
    )
    shadow.begin([there])
    with pytest.raises(
        ConfigurationError, match=r"cannot follow: the ranks train on an accelerator, whose bits"
    ):
        shadow.follow()
    assert giver.is_over


def test_what_it_holds_becomes_a_ranks_state(tmp_path):
    """It says when it holds all of it. The folder is free for the next shadow when the write has ended."""
    job, said = Job(tmp_path), []
    job.shadow._says_whole = said.append
    job.begin()
    job.train(3)
    job.end()
    held = job.shadow.release()
    assert (held.step, held.digest, said) == (3, job.ranks[0].carried.digest(), [True])
    while any(each.name == "paceline-checkpoint" for each in threading.enumerate()):
        threading.Event().wait(0.01)
    CheckpointFolder(tmp_path, "a card").open()
    job.shadow.is_whole = False
    assert job.shadow.release() is None


def test_shares_are_about_equal_and_leave_nothing_out():
    """One large parameter is one share."""
    sizes = [100, 5, 5, 5, 90, 30]
    shares = [Share(index, 3).indices(sizes) for index in range(3)]
    assert sorted(place for each in shares for place in each) == list(range(6))
    assert sorted(sum(sizes[place] for place in each) for each in shares) == [45, 90, 100]
