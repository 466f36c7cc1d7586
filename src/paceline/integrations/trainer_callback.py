"""`LeaveOnNotice`: a callback of Hugging Face's Trainer. When a machine will stop, it saves a checkpoint and ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.integrations.notices import Notice, NoticeVote


class LeaveOnNotice(TrainerCallback):
    """Saves a checkpoint and ends all ranks with code 143, if one of them is told to end.

    Ranks are told by SIGTERM, SIGUSR1 or `notice`. The Trainer writes a checkpoint into its folder of output,
    behind the next step but one, also if it saves none otherwise. Training can be resumed from there.

    Args:
        notice: The path of a file that appears, or a function that returns something true, when this machine goes soon.
    """

    def __init__(self, notice: Notice | None = None) -> None:
        self._notice = notice
        self._vote: NoticeVote | None = None
        self._leaves = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Listen for notices from now on. Collective."""
        self._vote = NoticeVote(self._notice)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for a checkpoint if a rank was told to end. Collective."""
        if self._vote is not None and self._vote.asks_to_leave():
            self._leaves = control.should_save = True
            control.should_evaluate = False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End all ranks if a notice asked for this checkpoint. Collective in that case."""
        if self._vote is not None and self._leaves:
            self._vote.leave()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._vote is not None:
            self._vote.close()
            self._vote = None
