"""What a rank with an accelerator does when it hears that its membership is over, and in which order."""

import threading
from concurrent.futures import ThreadPoolExecutor

from paceline.elastic.agent_connection import AgentConnection, Stop
from paceline.elastic.watcher import Watcher

LIMIT_S = 100.0


class Exit:
    """A way out of a membership that notes what it is told; the abort ends when the test says so."""

    def __init__(self):
        self.calls, self.aborts, self.may_end = [], threading.Event(), threading.Event()

    def enter(self):
        self.calls.append("enter")

    def withdraw(self):
        self.calls.append("withdraw")

    def abort(self):
        self.calls.append("abort")
        self.aborts.set()
        self.may_end.wait(LIMIT_S)
        self.calls.append("aborted")


def test_a_vote_is_withdrawn_before_the_abort_and_the_main_thread_goes_on_behind_it():
    """Otherwise the device votes on old bytes, or the abort meets the groups of the next membership."""
    leave = Exit()
    agent, end = AgentConnection.pair()
    with ThreadPoolExecutor(1) as other:  # in the main thread it would take the process's signals
        watcher = other.submit(Watcher, AgentConnection(end), leave).result()
    watcher.begin(3)
    agent.tell(Stop(3, "rank 1 is lost"))
    assert leave.aborts.wait(LIMIT_S)
    assert watcher.is_over
    main = threading.Thread(target=lambda: (watcher.acknowledge(), leave.calls.append("goes on")))
    main.start()
    main.join(0.2)  # it goes on here if it does not wait
    leave.may_end.set()
    main.join()
    agent.close()
    assert leave.calls == ["enter", "withdraw", "abort", "aborted", "goes on"]
