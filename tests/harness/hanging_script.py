"""A script whose second rank stops, or takes long, in the way that its first argument says."""

TRAINS_AND_HANGS = """\
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
how, kind = sys.argv[1:]
if kind == "paceline":
    from paceline import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")

def stuck():
    if how == "sleep":
        time.sleep(600)
    elif how == "gil":
        ctypes.PyDLL(None).sleep(600)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "barrier" :
        dist.barrier()
    elif how == "evaluate":
        until_s = time.monotonic() + 3.5
        while time.monotonic() < until_s:
            torch.ones(100, 100).sum()
    elif how == "save":
        with open("checkpoint", "wb") as file:
            for _ in range(50):
                file.write(bytes(100_000))
                file.flush()
                time.sleep(0.1)
    elif how == "pause":
        time.sleep(5)

model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(1, 5):
    if step == 4 and dist.get_rank() == 1:
        stuck()
    model(torch.ones(4, 8)).sum().backward()
if how == "pause":
    time.sleep(2)
dist.destroy_process_group()
"""
