"""A folder of checkpoints: torch loads them, a torn one is never the newest, and another job's are left alone."""

import copy
import errno
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic import checkpoints
from paceline.elastic.checkpoints import CheckpointFolder, RankCheckpoints, snapshot
from paceline.elastic.conflicts import check_given
from paceline.elastic.handover import Carried
from paceline.elastic.rollback import TrainingPosition
from paceline.errors import ConfigurationError

CARD = "torch 2\nmodel of 3 parameters\nGlobalShuffle of 64 samples"


def training(num_steps, dtype=torch.float32, batch=8):
    """A model with tied parameters, batch normalisation and an optimizer, after so many steps."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, dtype=dtype),
        torch.nn.BatchNorm1d(4, dtype=dtype),
        torch.nn.Linear(4, 4, dtype=dtype),
    )
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sampler = GlobalShuffle(64, GlobalBatch((batch,)), 0)
    for _ in range(num_steps):
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, Carried(model, [optimizer], [], sampler)


def taken(carried, step):
    return snapshot(carried, carried.rest_tree(TrainingPosition(step, 0, 8 * step), GlobalBatch((8,))))


def folder_of(path, **more):
    made = CheckpointFolder(path, CARD, **more)
    made.open()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_bits_come_back(tmp_path, dtype):
    """Also those of the state of bfloat16 parameters; the copy does not change with later steps."""
    model, _, carried = training(3, dtype)
    folder, kept = folder_of(tmp_path), copy.deepcopy(model.state_dict())
    copied = taken(carried, 3)
    digest = carried.digest()
    with torch.no_grad():
        for each in model.state_dict().values():
            each.zero_()
    assert folder.write(copied) == ""
    other, _, theirs = training(0, dtype)
    theirs.take(folder.load(folder.newest()), is_new=True)
    assert theirs.digest() == digest
    assert all(map(torch.equal, other.state_dict().values(), kept.values()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_it_without_paceline(tmp_path):
    """By the functions that its own checkpoints use."""
    model, optimizer, carried = training(3)
    folder = folder_of(tmp_path)
    assert folder.write(taken(carried, 3)) == ""
    other, new, theirs = training(0)
    new.param_groups[0]["lr"] = 7.0
    states = get_state_dict(other, new)
    found = {"model": states[0], "optimizer": states[1]}
    dcp.load(found, checkpoint_id=folder.newest())
    set_state_dict(other, new, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert new.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1
    assert theirs.digest() == carried.digest()
    assert all(map(torch.equal, other.buffers(), model.buffers()))


def test_a_torn_checkpoint_is_not_the_newest(tmp_path, monkeypatch):
    """Neither one under way, nor one whose disk was full; the next writer removes what is left."""
    _, _, carried = training(1)
    folder = folder_of(tmp_path)
    assert folder.write(taken(carried, 1)) == ""
    store, seen = checkpoints._store, []

    def fill(tree, path):
        store(tree, path)
        seen.append(folder.newest().name)
        (path / ".metadata").write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_store", fill)
    assert "No space left on device" in folder.write(taken(carried, 2))
    assert seen == ["step-000000001"]
    assert [each.name for each in tmp_path.glob("*step-*")] == ["step-000000001"]
    (tmp_path / ".unfinished-step-000000002").mkdir()
    folder.close()
    folder_of(tmp_path)
    assert [each.name for each in tmp_path.glob("*step-*")] == ["step-000000001"]


def test_the_oldest_are_removed(tmp_path):
    _, _, carried = training(1)
    folder = folder_of(tmp_path, keep=2)
    for step in (1, 5, 30, 5):
        assert folder.write(taken(carried, step)) == ""
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000000005", "step-000000030"]


def test_other_jobs_and_other_writers_are_refused(tmp_path, capsys):
    """Another version of torch is no other job."""
    _, _, carried = training(1)
    folder = folder_of(tmp_path)
    assert folder.write(taken(carried, 1)) == ""
    with pytest.raises(ConfigurationError, match="another process writes checkpoints into"):
        folder_of(tmp_path)
    RankCheckpoints(tmp_path, carried, CARD).save(TrainingPosition(2, 0, 16), GlobalBatch((8,)), waits=True)
    assert "step 2 was not written: another process writes" in capsys.readouterr().err  # a shadow does
    assert not (tmp_path / "step-000000002").exists()
    folder.close()
    CheckpointFolder(tmp_path, CARD.replace("torch 2", "torch 3")).open()
    for other in (CARD.replace("3 parameters", "4 parameters"), CARD + "\nmore"):
        with pytest.raises(ConfigurationError, match="of another job: for this job's, it has '"):
            CheckpointFolder(tmp_path, other).newest()
    (tmp_path / "job.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no job\.json"):
        CheckpointFolder(tmp_path, CARD).newest()


def test_a_process_that_has_written_nothing_leaves_the_folder_to_another_job(tmp_path):
    """A shadow of another model opens the folder before the agent refuses it."""
    folder_of(tmp_path).close()
    CheckpointFolder(tmp_path, "another card").open()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written into"):
        CheckpointFolder(tmp_path / "file" / "folder", CARD).open()


def test_a_damaged_checkpoint_is_named(tmp_path):
    _, _, carried = training(1)
    folder = folder_of(tmp_path)
    assert folder.write(taken(carried, 1)) == ""
    (data,) = folder.newest().glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="step-000000001 cannot be loaded"):
        folder.load(folder.newest())


def test_a_rank_saves_aside_and_resumes(tmp_path):
    """Each rank resumes with the seeds of all ranks."""
    model, _, carried = training(2)
    carried.seeds = ((1, 2, 3), (4, 5, 6))
    made = RankCheckpoints(tmp_path, carried, CARD)
    assert made.resume() is None
    made.save(TrainingPosition(2, 0, 16), GlobalBatch((8,)), waits=False)
    made.save(TrainingPosition(3, 0, 24), GlobalBatch((8,)), waits=True)
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000000002", "step-000000003"]
    other, _, theirs = training(0)
    tree = RankCheckpoints(tmp_path, theirs, CARD).resume()
    assert tree["position"] == [3, 0, 24]
    assert theirs.seeds == carried.seeds
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    with pytest.raises(ConfigurationError, match="steps with 8 samples, and this job's have 16"):
        RankCheckpoints(tmp_path, training(0, batch=16)[2], CARD).resume()
    shutil.rmtree(tmp_path / "step-000000003")
    assert json.loads((tmp_path / "job.json").read_text())["card"] == CARD


def test_a_checkpoint_is_a_folder_or_a_function():
    """Anything else is refused; so is a notice that is neither."""
    check_given("folder", None)
    check_given(print, "file")
    with pytest.raises(
        ConfigurationError, match=r"checkpoint=3.*give a folder, or a function without arguments"
    ):
        check_given(3, None)
    with pytest.raises(ConfigurationError, match="notice=3"):
        check_given(None, 3)
    check_given("folder", None, shadow=1)
    with pytest.raises(ConfigurationError, match=r"shadow=2\): a job has one shadow, or none"):
        check_given("folder", None, shadow=2)
    for nothing in (None, print):
        with pytest.raises(ConfigurationError, match=r"shadow=1\): a shadow needs a folder to write into"):
            check_given(nothing, None, shadow=1)
