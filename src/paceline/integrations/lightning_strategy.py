"""`PacelineStrategy`: Lightning's DDPStrategy with our wrapper; `Trainer(strategy="paceline")` after `import paceline`.

Lightning is one framework under two names, `lightning.pytorch` and `pytorch_lightning`, whose classes are strangers to
each other. So there is a strategy for either, made when it is first asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from typing import Any

from paceline.late_imports import when_imported

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_NAME = "PacelineStrategy"


def register() -> None:
    """Let Lightning find the strategy by the name "paceline", as soon as Lightning has been imported. Local."""
    for package in _PACKAGES:
        when_imported(f"{package}.strategies", functools.partial(_add, package))


def _add(package: str, strategies: Any) -> None:
    strategies.StrategyRegistry.register(
        "paceline", functools.partial(_make, package), description="DDP by Paceline", override=True
    )


def _make(package: str, **options: Any) -> Any:
    return strategy_of(package)(**options)


@functools.cache
def strategy_of(package: str) -> type:
    """Make the strategy for `lightning.pytorch` or `pytorch_lightning`."""
    import torch  # noqa: PLC0415  `import paceline` must not import torch

    from paceline.ddp import DistributedDataParallel  # noqa: PLC0415
    from paceline.integrations.notices import Notice, NoticeVote  # noqa: PLC0415
    from paceline.optim.shard import Sharded  # noqa: PLC0415

    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy
    callback: Any = importlib.import_module(f"{package}.callbacks").Callback

    class LeaveOnNotice(callback):  # type: ignore[misc]
        """A callback that, after a notice, saves a checkpoint where Lightning looks for one and ends all ranks."""

        def __init__(self, notice: Notice | None) -> None:
            self._notice = notice
            self._step = 0  # optimizer steps until now
            self._vote: NoticeVote | None = None

        def on_train_start(self, trainer: Any, _: Any) -> None:
            self._vote, self._step = NoticeVote(self._notice, replaces_sigterm=True), trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self._vote is None or trainer.global_step == self._step:  # in the midst of accumulation
                return
            self._step = trainer.global_step
            if self._vote.asks_to_leave():
                folder = trainer.default_root_dir
                trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(folder))
                self._vote.leave()

        def on_exception(self, *_: Any) -> None:
            self.teardown()

        def teardown(self, *_: Any, **__: Any) -> None:
            if self._vote is not None:
                self._vote.close()
                self._vote = None

    class PacelineStrategy(base):  # type: ignore[misc]
        """Data parallelism in Lightning with Paceline's DistributedDataParallel.

        Takes what Lightning's DDPStrategy takes. What that does not know is handed to the wrapper:
        `PacelineStrategy(compression="auto", bucket_cap_mb=10)`. For our backend between CPUs:
        `process_group_backend="paceline"`. A `ddp_comm_hook` is registered on every kind of device.

        If a rank gets SIGTERM or SIGUSR1, all ranks save a checkpoint behind the same step and exit with code 143.
        `notice` tells so as well: the path of a file that appears, or a function that returns something true. The
        checkpoint lies in `default_root_dir`, and `fit(..., ckpt_path="hpc")` goes on from there.
        """

        strategy_name = "paceline"

        def __init__(self, *arguments: Any, notice: Notice | None = None, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._notice = notice

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            if trainer.training and not any(isinstance(each, LeaveOnNotice) for each in trainer.callbacks):
                trainer.callbacks.append(LeaveOnNotice(self._notice))

        def teardown(self) -> None:
            strategy: Any = self  # of a class that mypy does not know
            every = strategy.optimizers
            # Lightning moves the whole state to the CPU, which no rank has of a sharded optimizer.
            strategy.optimizers = [each for each in every if not isinstance(each, Sharded)]
            super().teardown()
            strategy.optimizers = every

        def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
            device_ids = self.determine_ddp_device_ids()
            # As in Lightning: CUDA graphs want DDP to be built on a stream of its own.
            stream: Any = torch.Stream(self.root_device) if device_ids else contextlib.nullcontext()
            with stream:
                return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

        def _register_ddp_hooks(self) -> None:
            hook = self._ddp_comm_hook
            if hook is not None:
                if self._ddp_comm_wrapper is not None:
                    hook = self._ddp_comm_wrapper(hook)
                self.model.register_comm_hook(self._ddp_comm_state, hook)

    PacelineStrategy.__module__ = __name__
    PacelineStrategy.__qualname__ = _NAME  # so that a copy in another process finds it here
    return PacelineStrategy


def __getattr__(name: str) -> Any:
    """Return `PacelineStrategy` for the Lightning package that is imported, otherwise for the installed one."""
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = [package for package in _PACKAGES if package in sys.modules]
    installed = [package for package in _PACKAGES if importlib.util.find_spec(package.partition(".")[0])]
    for package in imported + installed:
        return strategy_of(package)
    raise ImportError(
        "PacelineStrategy needs Lightning, which is not installed. Install lightning or pytorch-lightning."
    )
