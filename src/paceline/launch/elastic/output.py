"""Sends the output of a host's processes to the launcher's own, into files, or both, as torchrun's `--tee` says.

Rules
1. Torch's own description of logs says where: <folder>/<run>_<random>/attempt_<start>/<local rank>/stdout.log. A start
   is that of all ranks, number 0, or of one replacement.
2. A thread per file shows its lines. Only the end of the launch waits for these threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.tail_log import tail_logfile

_LOOK_S = 0.1


@dataclass(frozen=True)
class Output:
    """The files and environment of one process's output."""

    files: tuple[str, str]  # for stdout and stderr; empty: where the launcher writes
    environment: Mapping[str, str]  # that tells the process of more
    has_ended: threading.Event = field(default_factory=threading.Event)  # set once it has written all

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[IO[bytes] | None]]:
        """Open the files for a process that starts; None where it writes to the launcher's output."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(Path(name).open("wb")) if name else None for name in self.files]


class Outputs:
    """The maker of the outputs. `config` is torch's, of a launch with so many local ranks."""

    def __init__(self, config: Any, num_local_ranks: int) -> None:
        self._logs, self._run_id = config.logs_specs, str(config.run_id)
        self._num_local_ranks = num_local_ranks
        self._prefix = Template(config.log_line_prefix_template or "[${role_name}${local_rank}]:")
        self._role = config.role
        self._shown: list[tuple[threading.Thread, Output]] = []

    def of_start(self, number: int, local_ranks: Iterable[int]) -> dict[int, Output]:
        """Make the outputs of a start, by local rank, and begin to show those that `--tee` names."""
        names = {"TORCHELASTIC_RUN_ID": self._run_id, "TORCHELASTIC_RESTART_COUNT": str(number)}
        environments = {local_rank: dict(names) for local_rank in range(self._num_local_ranks)}
        logs = self._logs.reify(environments)
        made = {}
        for local_rank, environment in environments.items():
            if local_rank not in local_ranks:
                Path(logs.error_files[local_rank]).parent.rmdir()  # torch makes one for each
                continue
            files = logs.stdouts[local_rank], logs.stderrs[local_rank]
            output = made[local_rank] = Output(files, environment)
            prefix = self._prefix.safe_substitute(
                role_name=self._role, local_rank=local_rank, rank=local_rank
            )
            for teed, shown in ((logs.tee_stdouts, sys.stdout), (logs.tee_stderrs, sys.stderr)):
                if local_rank in teed:
                    # `bool` keeps every line, because none is empty.
                    words = (prefix, teed[local_rank], shown, output.has_ended, _LOOK_S, bool)
                    thread = threading.Thread(target=tail_logfile, args=words, daemon=True)
                    thread.start()
                    self._shown.append((thread, output))
        return made

    def close(self) -> None:
        """Wait until every line is shown. All processes have ended before."""
        for thread, output in self._shown:
            output.has_ended.set()
            thread.join()
