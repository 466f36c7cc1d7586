"""`paceline run --min-ranks`: the agent of a host in the launcher, which starts the ranks, and lost ones again.

Hosts meet at the address of a first host (`several_hosts.py`). With `--peers` they find each other as an engine's ranks
do (`guest.py`): no host is special, and every rank begins alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch.distributed as dist

from paceline.elastic.guest import job_name
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.agent import Agent
from paceline.launch.elastic.guest import deciding
from paceline.launch.elastic.plan import Decider, OneHost, Plan, Start
from paceline.launch.elastic.several_hosts import connected
from paceline.launch.elastic.shadows import Shadows, ShadowStart
from paceline.launch.elastic.starting import Starter
from paceline.launch.hang_watch import HangWatch
from paceline.launch.launch_errors import InterruptedLaunchError, LaunchError


def run(arguments: LaunchArguments, hangs: HangWatch, note: Callable[[str], None]) -> None:
    """Run the script on every rank of this host, go on without those that are lost; as `launch`, errors included.

    `hangs` looks at them, and is told how many there are.
    """
    with _signals(arguments) as received, contextlib.ExitStack() as stack:

        def check() -> None:
            if received:
                why = f"{received[0].name} received; all rank(s) of {arguments.script} were stopped."
                raise InterruptedLaunchError(why, received[0])

        def check_whether_all_left() -> None:
            """Let the ranks leave after a signal. A second one, or the end of the grace, stops them."""
            if received and (len(received) > 1 or not agent.leave(f"{received[0].name} received")):
                check()

        enter = stack.enter_context
        job = None if arguments.guest is None else enter(deciding(arguments.guest, note, check))
        decider: Decider = OneHost() if job is None else job.decider
        others = None if job is None else job.others
        if others is not None:
            arguments.torchrun.local_addr = others.address.host
        torchrun = arguments.torchrun
        name = job_name(arguments.script, torchrun.training_script_args)
        words = [*["-m"] * torchrun.module, arguments.script, *torchrun.training_script_args]
        peers = None if arguments.guest is None else arguments.guest.peers
        how = ShadowStart(words, arguments.lost_after_s, arguments.shadow or "", peers)
        shadows = enter(Shadows(name, how, note))
        starter = enter(contextlib.closing(Starter(arguments)))
        start = Start(0, arguments.num_local_ranks, 0, 1, None) if job is None else None
        if arguments.num_machines > 1 and job is None:
            decider = others = enter(connected(arguments, starter.new_store(), note))
            start = others.meet(check)

        def followed(plan: Plan) -> None:
            if arguments.num_machines == 1:
                hangs.num_ranks = len(plan.members)
            elif arguments.hang_after_s:
                threading.Thread(target=_meet_to_watch, args=(hangs, plan), daemon=True).start()

        agent = Agent(arguments, decider, starter, start, note, followed, hangs.note_waits)
        agent.shadows = shadows
        try:
            try:
                while not agent.is_over:
                    agent.look()
                    check_whether_all_left()
                    if job is not None and not agent.trains and (why := job.is_over()) is not None:
                        note(why)
                        return
                    if job is not None and others is not None:
                        others.check_job()
            except InterruptedLaunchError:
                raise
            except LaunchError as error:
                agent.save(str(error), check)
                raise
            if job is not None and not agent.has_begun:
                note(
                    f"{arguments.script} made no paceline.Elastic. So nothing was elastic, and each process trained "
                    "alone, as rank 0 of 1. Make one, or leave --peers out."
                )
            elif job is not None and job.record is not None:
                job.record.end()
            if others is not None:
                others.finish(check)
        finally:
            agent.end(received[0] if received else signal.SIGTERM)


def _meet_to_watch(hangs: HangWatch, plan: Plan) -> None:
    """Let the launchers tell each other of hangs in the store of this plan. Blocks: its host may be gone already."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(*plan.store, is_master=False, wait_for_workers=False)
        hangs.meet(store, f"epoch {plan.epoch}", len(plan.members))


@contextlib.contextmanager
def _signals(arguments: LaunchArguments) -> Iterator[list[signal.Signals]]:
    """Yield a list to which the signals to be handled are added as they arrive."""
    received: list[signal.Signals] = []

    def take(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))

    names = {"SIGUSR1", *(word.strip() for word in arguments.torchrun.signals_to_handle.split(","))}
    before = {name: signal.signal(signal.Signals[name], take) for name in names}
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
