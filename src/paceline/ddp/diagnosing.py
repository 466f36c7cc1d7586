"""`model.doctor()`: all ranks exchange what they recorded of their last steps, and each says what delays them."""

from __future__ import annotations

import time

import torch
from torch.distributed import ProcessGroup

from paceline.comm.collectives import device_for_metadata
from paceline.comm.peers import Peers
from paceline.diagnosis import Diagnosis, diagnose
from paceline.observe.run_reading import run_of
from paceline.observe.run_records import RunHeader
from paceline.recording.recorder import Recorder
from paceline.version import __version__

_DOING = "exchanging what was recorded of the last steps"


def diagnose_together(
    recorder: Recorder, group: ProcessGroup, peers: Peers, device: torch.device
) -> Diagnosis:
    """What delays the last steps; the same on every rank. Collective; blocks for two all-gathers, of text."""
    place = device_for_metadata(group, device)
    own = recorder.lines()
    longest = max(map(int, peers.rows_of_all(torch.tensor([len(own)], device=place), group, _DOING)))
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\n")), dtype=torch.uint8).to(place)
    rows = peers.rows_of_all(padded, group, _DOING)
    run_id = recorder.header.run_id
    files = {f"rank {rank}": bytes(row.cpu().numpy().tobytes()) for rank, row in enumerate(rows)}
    return diagnose(run_of(RunHeader(run_id, (), time.time(), __version__), files))
