"""A drop-in for torch's DistributedDataParallel over any c10d process group: when which gradients are reduced."""

from paceline.ddp.accumulation import Window, windows
from paceline.ddp.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from paceline.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "Window", "convert_sync_batchnorm", "windows"]
