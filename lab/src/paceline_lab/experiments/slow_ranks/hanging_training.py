"""A training of which one rank hangs, or takes long for a reason: what `hangs` runs under `paceline run`.

python -m paceline_lab.experiments.slow_ranks.hanging_training FOLDER HOW RANK STEP WRAPPER

The rank leaves the time in `FOLDER/reached` just before. With torch's flight recorder switched on, each rank also
leaves what that holds in `FOLDER/flight/rank_N`, once a second: for Gloo torch writes nothing by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

import paceline

NUM_STEPS = 40
_STEP_S, _FOREVER_S = 0.03, 600.0
_LONG_S = 8.0  # more than a hundred steps, and longer than nothing may move (`--hang-after`)
_SHORT_S = 3.0
_DUMPS_S = 1.0


class _NeverReads(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(_FOREVER_S)
        return index


def _sleeps() -> None:
    time.sleep(_FOREVER_S)


def _holds_the_gil() -> None:
    ctypes.PyDLL(None).sleep(int(_FOREVER_S))


def _is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _waits_for_its_loader() -> None:
    next(iter(DataLoader(_NeverReads(), num_workers=1)))


def _enters_another_collective() -> None:
    dist.barrier()


def _computes() -> None:
    until_s = time.monotonic() + _LONG_S
    while time.monotonic() < until_s:
        torch.ones(100, 100).sum()


def _writes() -> None:
    until_s = time.monotonic() + _LONG_S
    with Path(sys.argv[1], "checkpoint").open("wb") as file:
        while time.monotonic() < until_s:
            file.write(bytes(200_000))
            file.flush()
            time.sleep(0.1)


def _compiles() -> None:
    subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import time; end = time.monotonic() + {_LONG_S}\nwhile time.monotonic() < end: pass",
        ],
        check=True,
    )


def _pauses() -> None:
    time.sleep(_SHORT_S)


HANGS: Mapping[str, Callable[[], None]] = {
    "sleeps": _sleeps,
    "holds the GIL": _holds_the_gil,
    "is stopped": _is_stopped,
    "waits for a lock": _waits_for_a_lock,
    "waits for its loader": _waits_for_its_loader,
    "enters another collective": _enters_another_collective,
}
"""What a rank does that hangs."""
LONG: Mapping[str, Callable[[], None]] = {
    "evaluates": _computes,
    "all evaluate": _computes,
    "writes a checkpoint": _writes,
    "compiles in its first step": _compiles,
    "pauses for 3 s": _pauses,
    "starts late": lambda: time.sleep(_LONG_S),
}
"""What takes long, and is no hang. In the second all ranks do it; the last is before the first collective."""


def main() -> None:
    """Train, and hang if this rank was chosen to."""
    folder, how, culprit, at_step, wrapper = (
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
    )
    is_culprit = int(os.environ["RANK"]) == culprit
    if how == "starts late" and is_culprit:
        LONG[how]()
    dist.init_process_group("gloo")
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        threading.Thread(target=_dump, args=(folder / "flight",), daemon=True).start()
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model: Any = paceline.DistributedDataParallel(net) if wrapper == "paceline" else TorchDDP(net)
    for step in range(1, NUM_STEPS + 1):
        time.sleep(_STEP_S)
        strikes = is_culprit or how == "all evaluate"
        if strikes and how != "starts late" and step == at_step:
            (folder / f"reached.{os.environ['RANK']}").write_text(repr(time.monotonic()))
            {**HANGS, **LONG}[how]()
        model(torch.ones(4, 64)).sum().backward()
    dist.destroy_process_group()


def _dump(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    place = folder / f"rank_{dist.get_rank()}"
    while True:
        time.sleep(_DUMPS_S)
        dump: Any = torch._C._distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
        half = folder.parent / f"flight.{dist.get_rank()}"
        half.write_bytes(dump)
        half.replace(place)


if __name__ == "__main__":
    main()
