"""What `Elastic` does on one rank, without processes: its client is the test's."""

import types

import pytest

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic import Elastic
from paceline.elastic.agent_connection import Saved
from paceline.elastic.client import ElasticClient
from paceline.elastic.rollback import TrainingPosition
from paceline.errors import ProtocolError


def elastic_of(**attributes):
    """An `Elastic` that has completed three steps of four samples, and what it tells its agent."""
    told = []
    made = Elastic.__new__(Elastic)
    shuffle = GlobalShuffle(20, GlobalBatch((4,)), 0)
    connection = types.SimpleNamespace(tell=told.append)
    vars(made).update(
        _sampler=shuffle,
        _position=TrainingPosition(3, 0, 12),
        _is_given_up=False,
        _carried=types.SimpleNamespace(is_divided=False),
        _client=types.SimpleNamespace(connection=connection),
    )
    vars(made).update(attributes)
    return made, told


def test_a_checkpoint_that_raises_is_told():
    """It was reported as made. A good one finds the sampler behind the last completed step."""

    def fail():
        raise OSError(28, "No space left on device")

    made, told = elastic_of(_checkpoint=fail)
    with pytest.raises(OSError, match="No space left"):
        made._save()
    assert told == [Saved("OSError: [Errno 28] No space left on device")]
    states = []
    made, told = elastic_of(_checkpoint=lambda: states.append(made._sampler.state_dict()))
    made._save()
    assert told == [Saved("")]
    assert states[0]["position"] == 12


def test_a_further_step_than_the_others_is_refused():
    """A rank that had counted other epochs than the others trained them alone."""
    client = ElasticClient.__new__(ElasticClient)
    client._others_ended = False
    client.check_others_train(9, 1)
    client._others_ended = True
    with pytest.raises(
        ProtocolError, match=r"asks for step 10, of epoch 1, after the other ranks have ended .*range"
    ):
        client.check_others_train(9, 1)
