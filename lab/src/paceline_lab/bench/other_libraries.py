"""Adapters of other data-parallel libraries. Each library is imported only when it is measured.

Each is set up as its documentation says for processes without accelerators. All use the Gloo group that is open
already, except torchft, which brings its own. Nothing is tuned for or against a library.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

POWER_SGD_RANK = 1


def _fp16(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415

    logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Callable[[nn.Module], None]] = {"fp16": _fp16, "powersgd": _power_sgd}


class Parallel:
    """A module in parallel training, with the calls of a training loop. Each library implements them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()


class Accelerated(Parallel):
    """Accelerate: `prepare`, then its own backward. Underneath is torch's DDP."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from accelerate import Accelerator  # noqa: PLC0415

        self.accelerator = Accelerator(cpu=True)
        super().__init__(*self.accelerator.prepare(module, optimizer))

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)


class DeepSpeedZero0(Parallel):
    """DeepSpeed with ZeRO stage 0: plain data parallelism in float32."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: PLC0415
        from deepspeed.utils import logger  # noqa: PLC0415

        logger.setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,  # its default, 1.0, is work that no other side does
        }
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        super().__init__(engine, optimizer)
        self.engine: Any = engine

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()


class FaultTolerant(Parallel):
    """torchft: every rank is a replica of its own, a lighthouse on rank 0 agrees each step on who takes part."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        os.environ.setdefault("RUST_LOG", "warn")
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: PLC0415
        from torchft.coordination import LighthouseServer  # noqa: PLC0415

        rank, num_ranks, address = dist.get_rank(), dist.get_world_size(), _own_address()
        lighthouse: list[Any] = [None]
        if rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=num_ranks)
            lighthouse = [f"http://{address}:{self._lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(lighthouse, src=0)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(minutes=5)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=num_ranks,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=lighthouse[0],
            replica_id=f"rank_{rank}",
            hostname=address,
            init_sync=False,
            timeout=timedelta(minutes=5),
            quorum_timeout=timedelta(minutes=5),
        )
        super().__init__(DistributedDataParallel(self.manager, module), Optimizer(self.manager, optimizer))


def _own_address() -> str:
    """Return this host's address on the network where the ranks meet. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return str(probe.getsockname()[0])


ADAPTERS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Parallel]] = {
    "accelerate": Accelerated,
    "deepspeed": DeepSpeedZero0,
    "torchft": FaultTolerant,
}
