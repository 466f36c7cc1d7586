"""A folder of checkpoints in the format of `torch.distributed.checkpoint`, which torch loads without Paceline.

Rules
1. A checkpoint is a folder `step-000000120`. It is written under another name, flushed to the disk, and then renamed.
   So a torn one is never the newest, whatever is killed.
2. `model` and `optimizer` have the keys that functions of `torch.distributed.checkpoint.state_dict` give. `elastic` has
   what else training needs: one JSON text, and the tensors that are in neither. `load` unpickles nothing.
3. `job.json` says which model and data the folder belongs to. A lock, which ends with its process, keeps a second
   writer out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.comm.device import is_accelerator
from paceline.data import GlobalBatch
from paceline.elastic.agent_connection import RESUME, difference
from paceline.elastic.handover import Carried
from paceline.elastic.rollback import TrainingPosition, copied
from paceline.elastic.state_tree import PackedState, pack, unpack
from paceline.errors import ConfigurationError

_NAME, _UNFINISHED, _JOB, _LOCK = "step-", ".unfinished-", "job.json", ".lock"


class FolderInUseError(ConfigurationError):
    """Another process writes checkpoints into the folder."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state after a step, which later steps do not change."""

    step: int
    tree: dict[str, Any]  # as it is stored


def snapshot(carried: Carried, rest: Mapping[str, Any]) -> Snapshot:
    """Copy the state that `carried` holds; `rest` is what `Carried.rest_tree` has returned after the same step. Local.

    A tensor that is in the model or in an optimizer's state is stored under torch's name for it.
    """
    names = carried.names()
    tree: dict[str, Any] = {
        "model": {name: each for name, each in carried.module_state().items() if isinstance(each, Tensor)},
        "optimizer": carried.optimizer_state(),
    }
    # Of tied tensors the first one's name.
    stored = {_identity(each): f"model.{name}" for name, each in reversed(tree["model"].items())}
    for name, states in tree["optimizer"]["state"].items():
        for key, each in states.items():
            if isinstance(each, Tensor):
                stored[_identity(each)] = f"optimizer.state.{name}.{key}"
    packed = pack({**carried.whole_tree(), **rest})
    keys = [stored.get(_identity(each), f"elastic.{place}") for place, each in enumerate(packed.tensors)]
    words = json.dumps({"words": packed.words.decode(), "keys": keys, "names": names})
    tree["elastic"] = {"words": torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)}
    for key, each in zip(keys, packed.tensors, strict=True):
        if key.startswith("elastic."):
            tree["elastic"][key.removeprefix("elastic.")] = each
    return Snapshot(rest["position"][0], copied(tree))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return by what a tensor is known again after `detach`; an empty one by nothing."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())


class CheckpointFolder:
    """The checkpoints of one job in `path`; `card` says which model and data it trains."""

    def __init__(self, path: Path | str, card: str, keep: int = 3) -> None:
        self.path, self._card, self._keep = Path(path), card, keep
        self._lock: int | None = None

    # ---- reading

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None. Raises ConfigurationError if it is of another job."""
        if found := self._complete():
            self._check_job()
        return found[-1] if found else None

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Return the tree that was given to `snapshot`. Blocks: reads all of it. Raises ConfigurationError."""
        try:
            metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
            flat = {
                key: torch.empty(each.size, dtype=each.properties.dtype)
                for key, each in metadata.items()
                if isinstance(each, TensorStorageMetadata)
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that one process loads is meant
                dcp.load(flat, checkpoint_id=checkpoint, no_dist=True)
            described = json.loads(flat["elastic.words"].numpy().tobytes())
            tensors = [flat[key] for key in described["keys"]]
            tree: dict[str, Any] = unpack(PackedState(described["words"].encode(), tensors))
        except (Exception, CheckpointException) as error:  # many kinds are of a file that is damaged
            why = [type(error).__name__, *str(error).strip().splitlines()][-1]
            raise ConfigurationError(
                f"the checkpoint {checkpoint} cannot be loaded ({why:.200}). Remove that folder, and training resumes "
                "from the one before."
            ) from error
        return tree

    def _complete(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(each for each in self.path.glob(f"{_NAME}*") if (each / ".metadata").is_file())

    def _check_job(self) -> None:
        try:
            card = json.loads((self.path / _JOB).read_text())["card"]
        except (OSError, ValueError, KeyError, TypeError):
            card = ""
        why = difference(_lasting(card), _lasting(self._card)) if card else f"it has no {_JOB}"
        if why is not None:
            raise ConfigurationError(
                f"the folder {self.path} holds checkpoints of another job: for this job's, {why}. Name another folder."
            )

    # ---- writing

    def open(self) -> None:
        """Keep other writers out until `close`. Raises ConfigurationError, also for the folder of another job."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise FolderInUseError(
                f"another process writes checkpoints into {self.path}. Name another folder, or end that process."
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"checkpoints cannot be written into {self.path} ({error.strerror}). Name a folder that can be made."
            ) from error
        if self._complete() or (self.path / _JOB).exists():
            self._check_job()
        for left in self.path.glob(f"{_UNFINISHED}*"):  # of a writer that was killed
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, given: Snapshot) -> str:
        """Write a checkpoint, and remove the oldest ones. Return why that failed, or an empty text. Blocks.

        Local: another thread may call it while training goes on.
        """
        name = f"{_NAME}{given.step:09d}"
        unfinished, finished = self.path / f"{_UNFINISHED}{name}", self.path / name
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            _store(given.tree, unfinished)
            _flush(unfinished)
            # Not when the folder is opened: a shadow that is refused leaves it to the right one.
            if not (self.path / _JOB).exists():
                named = self.path / f"{_UNFINISHED}job"
                named.write_text(json.dumps({"card": self._card}))
                named.replace(self.path / _JOB)
            if finished.exists():  # of a run that was repeated from an earlier checkpoint
                shutil.rmtree(finished)
            unfinished.rename(finished)
            _flush(self.path)
            for old in self._complete()[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except Exception as error:  # noqa: BLE001  torch wraps what the kernel says
            shutil.rmtree(unfinished, ignore_errors=True)
            return f"{type(error).__name__}: {error}"[:300]
        return ""


class RankCheckpoints:
    """A rank's checkpoints in a folder: what it resumes from, and what it saves while it trains."""

    def __init__(self, path: Path | str, carried: Carried, card: str) -> None:
        self._carried, self._folder = carried, CheckpointFolder(path, card)
        self.path = self._folder.path.absolute()
        self._is_open = False
        self._writer: threading.Thread | None = None

    @classmethod
    def of(cls, checkpoint: object, carried: Carried, card: str) -> RankCheckpoints | None:
        """Return the checkpoints of the folder that the script or the environment names, or None."""
        path = checkpoint if isinstance(checkpoint, (str, os.PathLike)) else os.environ.get(RESUME)
        if path and is_accelerator(carried.device):
            raise ConfigurationError("checkpoint= of a model on an accelerator is a function, not a folder.")
        return None if not path else cls(Path(path), carried, card)

    def newest(self) -> dict[str, Any] | None:
        """Return the tree of the newest checkpoint, or None if there is none. Local.

        Raises ConfigurationError if it is of another job, or damaged.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        tree = self._folder.load(newest)
        saved, own = GlobalBatch.from_dict(tree["batch"]).size, self._carried.sampler.batch.size
        if saved != own:
            raise ConfigurationError(
                f"the checkpoint {newest} is of steps with {saved} samples, and this job's have {own}. The "
                "learning rate belongs to a number of samples. Keep it by GlobalBatch.of(size, num_ranks), or name "
                "another folder."
            )
        return tree

    def resume(self) -> dict[str, Any] | None:
        """Take the newest checkpoint, and return it as `newest` does. Local."""
        if (tree := self.newest()) is not None:
            self._carried.take(tree, is_new=True)
        return tree

    def save(self, position: TrainingPosition, batch: GlobalBatch, waits: bool) -> None:
        """Write the state behind the last completed step, at `position`. `batch` is that of the job's beginning. Local.

        If it `waits`, it raises ConfigurationError for a folder of another job, and OSError if it could not write.
        Otherwise a thread writes a copy; nothing is done if that still writes an earlier one.
        """
        if not self._is_open:
            try:
                self._folder.open()
            except ConfigurationError as error:
                if waits and not isinstance(error, FolderInUseError):  # a shadow may write there
                    raise
                step = position.step
                sys.stderr.write(f"paceline: the checkpoint of step {step} was not written: {error}\n")
                return
            self._is_open = True
        if self._writer is not None and self._writer.is_alive():
            if not waits:
                return
            self._writer.join()
        copy = snapshot(self._carried, self._carried.rest_tree(position, batch))
        if waits:
            if why := self._folder.write(copy):
                raise OSError(why)
        else:
            self._writer = threading.Thread(target=self._write, args=(copy,), name="paceline-checkpoint")
            self._writer.start()

    def _write(self, copy: Snapshot) -> None:
        if why := self._folder.write(copy):
            sys.stderr.write(f"paceline: the checkpoint of step {copy.step} was not written: {why}\n")


def _lasting(card: str) -> str:
    """Return a card without the version of torch, because a job with another version may resume."""
    return "\n".join(line for line in card.split("\n") if not line.startswith("torch "))


def _store(tree: dict[str, Any], folder: Path) -> None:
    """Write a tree as `dcp.save` does in a job of one process, but without its collectives and its warning."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner()
    writer.reset(folder)
    planner.set_up_planner(tree, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _flush(folder: Path) -> None:
    """Wait until the folder's names are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system that has no such thing
        os.fsync(number)
    os.close(number)
