"""What ranks ask the store for while they wait for each other: a group opens in as many round trips."""

from datetime import timedelta

from paceline.comm.rendezvous import Rendezvous
from paceline.comm.sealed_store import SealedStore


class Store:
    """A store in this process, which counts what it is asked. Each rank publishes as soon as it is waited for."""

    def __init__(self):
        self.values, self.num_asked = {}, 0

    def set(self, key, words):
        self.values[key] = words.encode()

    def check(self, keys):
        self.num_asked += 1
        return all(key in self.values for key in keys)

    def get(self, key):
        self.num_asked += 1
        return self.values[key]

    def wait(self, keys, _timeout):
        self.num_asked += 1
        for key in keys:
            SealedStore(self, "rendezvous").set(key, f"words of {key}")


def test_who_comes_in_time_is_asked_for_once():
    """Two round trips for what is there, four for what is waited for; nobody looks for the dead meanwhile."""
    store = Store()
    meeting = Rendezvous(store, 0, 4, timedelta(seconds=5), "testing")
    meeting.publish("card", "words of card/0")
    assert meeting.collect("card") == [f"words of card/{rank}".encode() for rank in range(4)]
    assert store.num_asked == 2 + 3 * 4
