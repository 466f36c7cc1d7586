"""A store whose host is switched off says nothing any more, and its client answers nobody meanwhile."""

import threading

from paceline.comm import failure_detection


class HangingStore:
    """Answers when it is told to."""

    def __init__(self):
        self.may_answer = threading.Event()
        self.said = []

    def get(self, key):
        self.may_answer.wait(60)

    def set(self, key, words):
        self.said.append(key)


def test_who_leaves_says_nothing_to_a_store_that_hangs():
    """Of several that wait for a group one asks the store; the others' last words would wait for its lock."""
    store = HangingStore()
    query = failure_detection._StoreQuery(store, "failure_detection")
    failure_detection._say_left(store, 0, failure_detection._Progress())
    assert not store.said
    store.may_answer.set()
    query.join(20)
    failure_detection._say_left(store, 0, failure_detection._Progress())
    assert store.said == ["left/0"]
