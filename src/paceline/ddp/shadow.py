"""A rank that has run out of batches shadows the others' collectives (torch's `Join`)."""

from __future__ import annotations

from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from paceline.ddp.coordinator import StepCoordinator


class Shadow(JoinHook):
    """What a joined rank does for each forward and backward of the ranks that still have inputs."""

    def __init__(self, joinable: Joinable, steps: StepCoordinator) -> None:
        self._joinable, self._steps = joinable, steps
        super().__init__()

    def main_hook(self) -> None:
        """Match one forward and, if the others will synchronize, one backward, contributing zeros. Collective."""
        steps = self._steps
        others = steps.joining.announce(is_active=False)
        if not (others.synchronizes or others.opens_window):
            return
        is_window = others.opens_window and not others.synchronizes
        exchange = steps.weighing.exchange() if is_window else None  # before the first forward
        if steps.wrapped.training and steps.has_synchronized_buffers():
            steps.buffers.synchronize(steps.joining.agree_on_source(is_candidate=False))
        steps.reducer.prepare()
        steps.buffers.come_at_end(False)
        steps.recovery.drop_gradients()
        if exchange is not None:
            steps.match_window(exchange.finish())
        elif others.opens_window:
            steps.weighing.exchange().finish().raise_if_refused(steps.membership.rank)  # as backward begins
            steps.run_without_autograd(share=0.0)
        else:
            steps.run_without_autograd()
        steps.recovery.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._steps.take_final_model(is_last_joiner)
        self._joinable._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it enabled
