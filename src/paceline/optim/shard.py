"""`shard`: an ordinary torch optimizer whose state and step are divided among the ranks of a wrapped model.

Rules
1. On one host gradients are whole on every rank. So code that reads them between backward and the step (clipping, a
   GradScaler, logging) needs no change. Between hosts a rank has those that it steps (`reductions.owned_mean`), and
   reading `.grad` raises.
2. Every rank steps its parts of the parameters (`shares`) and receives the others (`sharded_step`). An element is
   computed once, by the arithmetic of the plain optimizer, so all ranks have the bits that it would have made.
3. The optimizer stays the object that it was, with its groups: schedulers and scripts change rates there. Only its
   state is gone from sight: no rank has all of it (`shard_state`).
4. Hooks of a step run once a step, around all of it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm.collectives import can_all_to_all, shares_memory
from paceline.comm.device import is_accelerator
from paceline.errors import ConfigurationError, forget_frames
from paceline.optim.adopted_optimizer import (
    PER_ELEMENT,
    AdoptedOptimizer,
    adopt,
    ordinary,
    parameters_of,
    refuse,
    settings_of,
    why_not_by_parameter,
)
from paceline.optim.behind_forward import BehindForward
from paceline.optim.shard_state import (
    OwnPart,
    Waiting,
    cut_state,
    divide_waiting,
    full_state,
    move,
    own_parts,
    packed_groups,
    state_of_all,
)
from paceline.optim.sharded_step import Cut, Members, ShardedStep
from paceline.optim.shares import Part, is_dense
from paceline.reductions.owned_mean import Owned, ScatteredParameter, for_owners

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_WHY_ALL = (
    "the optimizer is sharded (paceline.optim.shard), so each rank takes part in every step and alone has its part of "
    "the state"
)
_LATER = "_divide_later"  # attribute of an optimizer that is sharded as soon as there are several ranks
_owners = WeakIdKeyDictionary()  # of parameters: a weak reference to the sharded optimizer


def shard(
    optimizer: AnyOptimizer,
    model: Any,
    *,
    per_parameter: bool = False,
    master_weights: bool = False,
    whole_gradients: bool | None = None,
) -> AnyOptimizer:
    """Divide an optimizer's state and step among the ranks that train `model`.

    With N ranks each holds 1/N of the state and computes 1/N of the step, and the ranks then exchange the parameters.
    For SGD, Adam and other optimizers that work element by element, parameters are bitwise those of the optimizer
    without this. `zero_grad`, `param_groups`, schedulers and a GradScaler go on working.

    With a model that was wrapped with `overlap_forward`, `step()` returns at once; `overlap` is included. The step and
    the exchange run behind the next forward, whose modules wait for their own parameters. The step takes the gradients
    then: `.grad` is None afterwards.

    Args:
        optimizer: One of torch's, or LARS or LAMB of `paceline-recipes`, over parameters of `model`. It has not
            stepped. It is changed in place, so schedulers may have been given it before.
        model: What `paceline.DistributedDataParallel` returned. Several optimizers may share its parameters out.
        per_parameter: For an optimizer of another class. It says that each parameter is stepped by its own gradient
            and state only, and that a step neither changes `param_groups` nor counts its calls. Each parameter is
            then stepped as a whole, by one rank.
        master_weights: Step a float32 copy of each float16 or bfloat16 parameter, which its owner keeps.
        whole_gradients: Whether every rank has all gradients. False: it has those that it steps, and a step sends as
            many bytes as an all-reduce. Reading `.grad` before the step raises; clip by `model.clip_grad_norm_`. The
            step takes the gradients, so `.grad` is None afterwards. None: False where that saves bytes, so between
            hosts with the plain mean, or with it compressed to 16 bits.

    Returns:
        `optimizer` itself. With one rank, and without master weights, it is as it was.

    Contract:
        Local; on every rank, before the first step. From then on `optimizer.step()` is collective: every rank, as often
        as any other. Blocks: yes, without `overlap_forward`. Afterwards parameters are bitwise equal on all ranks.

    Raises:
        ConfigurationError: The model or the optimizer is of a kind that cannot be divided; nothing was changed.

    Source:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1.
    """
    _check(optimizer, model, per_parameter)
    if model.membership.size > 1 or master_weights:
        _divide(optimizer, model, master_weights, whole_gradients)
    else:
        optimizer.__dict__[_LATER] = functools.partial(_divide, optimizer, model, False, whole_gradients=True)
    return optimizer


def _divide(
    optimizer: Optimizer, model: Any, master_weights: bool, whole_gradients: bool | None = None
) -> None:
    members = model.membership
    if whole_gradients is False and (why := _why_whole(optimizer, members)):
        _refuse(f"whole_gradients=False is not possible, because {why}. Leave it out.")
    is_whole, is_muon = type(optimizer) not in PER_ELEMENT, type(optimizer).__name__ == "Muon"
    if whole_gradients and isinstance(members.model.reduction, Owned):  # an optimizer before had parts
        members.model.reduction.disown(parameters_of(optimizer))
    cut = Cut(is_whole=is_whole, is_muon=is_muon, has_masters=master_weights)
    owned = (lambda: None) if whole_gradients else functools.partial(_owned_mean, optimizer, members)
    overlap = getattr(model, "forward_overlap", None)
    behind = None
    if overlap is not None:
        behind = BehindForward.of(overlap, f"paceline sharded steps of rank {members.rank}")
    _adopt(optimizer, ShardedStep(members, cut, owned, functools.partial(_buckets_of, members), behind))


def is_sharded(optimizer: object) -> bool:
    """Return whether `shard` has taken this optimizer, also if it has left it as it was on one rank. Local."""
    return isinstance(optimizer, Sharded) or _LATER in getattr(optimizer, "__dict__", ())


def why_not_among_others(optimizer: Optimizer) -> str | None:
    """Return why a sharded optimizer cannot go on among other ranks; None if it can. Local."""
    found = parameters_of(optimizer)
    if any(is_accelerator(each.device) for each in found):
        return (
            "an optimizer is sharded, and its parameters are on an accelerator, whose bits no shadow repeats. Leave "
            "out shard()."
        )
    if isinstance(optimizer, Sharded) and optimizer._shares.cut.has_masters:
        return "a sharded optimizer has master weights, which a shadow does not follow. Leave out master_weights=."
    return None


def divide_among_members(optimizer: Optimizer) -> None:
    """Divide a sharded optimizer's state among the ranks that the model has now. Collective over them; may block.

    Every rank brings the whole state (`gather_whole`, `hold_whole`). Or none does, and their parts move.
    """
    later = vars(optimizer).get(_LATER)
    if later is not None and later.args[1].membership.size > 1:
        whole = dict(optimizer.state)
        optimizer.state.clear()
        del optimizer.__dict__[_LATER]
        later()
        assert isinstance(optimizer, Sharded)
        optimizer._gathered, optimizer._followed = whole, ""
    if isinstance(optimizer, Sharded):
        if optimizer._gathered:
            optimizer._cut_gathered(optimizer._gathered)
        else:
            optimizer._follow_members()


def full_state_dict(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the whole state of a sharded optimizer in torch's format, on rank 0; None on the others.

    It loads into the plain optimizer, and into a sharded one on any number of ranks. Return a plain optimizer's
    `state_dict()`, on every rank.

    Contract:
        Collective: every rank, between two steps.  Blocks: until rank 0 has received the others' parts.

    Raises:
        PeerLostError: A rank died or hangs.
    """
    if not isinstance(optimizer, Sharded):
        return optimizer.state_dict()
    return optimizer._full_state()


_refuse = functools.partial(refuse, "shard")


def _check(optimizer: Any, model: Any, per_parameter: bool) -> None:
    """Raise ConfigurationError if the optimizer's steps cannot be divided among the ranks of this model."""
    if not isinstance(model, Module) or not hasattr(model, "membership"):
        _refuse(
            f"the model is a {type(model).__name__}. Pass what paceline.DistributedDataParallel returned; torch's "
            "class of that name does not know who shares a step."
        )
    members: Members = model.membership  # type: ignore[assignment]
    if members.model.is_made_up_for:
        _refuse("the model is paceline.Elastic's already. Call shard() before paceline.Elastic(...).")
    if is_sharded(optimizer):
        _refuse("this optimizer has been through shard() before. Call it once.")
    kind = getattr(optimizer, "_kind", type(optimizer))
    if not isinstance(optimizer, Optimizer) or kind is not type(optimizer):
        _refuse(
            f"the optimizer is a {type(optimizer).__name__} that is wrapped or overlapped already. Pass the "
            "torch.optim.Optimizer itself, before anything else takes it."
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        _refuse(
            f"{type(optimizer).__name__} divides the state itself. Give the plain optimizer that it wraps, and leave "
            "out hook_with_zero_step."
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        _refuse(
            f"{kind.__name__} evaluates its closure as often as it likes, so ranks cannot divide its step. Use an "
            "optimizer that takes one step from the gradients, such as AdamW."
        )
    if not per_parameter and (why := why_not_by_parameter(kind)):
        _refuse(f"{why}. If it does, pass per_parameter=True; otherwise train without shard().")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        _refuse("differentiable=True needs the whole step in one graph. Leave it out.")
    if any(float(kept.get("step", 1)) > 0 for kept in optimizer.state.values() if kept):
        _refuse(
            f"this {kind.__name__} has stepped, or loaded its state, already. Call shard() first, then "
            "optimizer.load_state_dict(state)."
        )
    _check_parameters(optimizer, model)


def _check_parameters(optimizer: Optimizer, model: Module) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in parameters_of(optimizer):
        if id(parameter) not in names:
            _refuse(
                f"a parameter of shape {tuple(parameter.shape)} is not the model's, so no rank reduces its gradient. "
                "Make the optimizer of model.parameters()."
            )
        name = names[id(parameter)]
        if (other := _owner_of(parameter)) is not None:
            _refuse(
                f"{name} is stepped by another sharded optimizer ({type(other).__name__}) already. Give each parameter "
                "to one of them."
            )
        if not is_dense(parameter):
            _refuse(
                f"{name}, with the strides {parameter.stride()}, has gaps in its memory, so it cannot be sent as it "
                "lies. Call .contiguous() on its data first."
            )
    for name, part in model.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            _refuse(
                f"{name} has sparse gradients, whose rows belong to no rank's part. Build the embedding with "
                "sparse=False."
            )


def _owner_of(parameter: Parameter) -> Optimizer | None:
    """Return the sharded optimizer that steps this parameter, if it is alive."""
    if parameter not in _owners:
        return None
    if _owners[parameter]() is not None:
        gc.collect()  # a scheduler may hold one that the script has dropped, and be held by it
    owner: Optimizer | None = _owners[parameter]()
    return owner


def _why_whole(optimizer: Optimizer, members: Members) -> str:
    """Return why gradients have to be whole over these groups, or cost no bytes; "" if neither. Local."""
    groups, reduction = members.gradient_groups, members.model.reduction
    hinders = {
        "the ranks share memory, where whole gradients cost no bytes": all(map(shares_memory, groups)),
        f"gradients are combined by {reduction!r}": for_owners(reduction) is None,
        "buckets take turns over several process groups": len(groups) > 1,
        "the process group has no all-to-all": not all(map(can_all_to_all, groups)),
        "a parameter is of a class of its own": any(
            type(p) not in (Parameter, ScatteredParameter) for p in parameters_of(optimizer)
        ),
    }
    return next((why for why, is_so in hinders.items() if is_so), "")


def _owned_mean(optimizer: Optimizer, members: Members) -> Owned | None:
    """Return what reduces each gradient for its owner; None: gradients are whole. Local; the same on every rank."""
    if _why_whole(optimizer, members):
        return None
    plain = members.model.reduction
    owned = for_owners(plain)
    if owned is not None and owned is not plain:
        owned.in_place_of = plain
        members.model.reduce_by(owned)
    return owned


def _buckets_of(members: Members) -> list[list[Parameter]]:
    return [bucket.parameters for bucket in members.model.reducer.buckets]


def _adopt(optimizer: Optimizer, shares: ShardedStep) -> None:
    begun, members = optimizer.state_dict() if optimizer.state else None, shares.members
    followed = members.name if members.epoch == 0 else ""
    adopt(optimizer, Sharded, "shard", _shares=shares, _waiting={}, _followed=followed, _gathered=None)
    members.keep_together(_WHY_ALL)
    for parameter in parameters_of(optimizer):
        _owners[parameter] = weakref.ref(optimizer)
    shares.follow(parameters_of(optimizer))
    if begun is not None:  # Adagrad's, which begins before the first step
        optimizer.load_state_dict(begun)


class Sharded(AdoptedOptimizer):
    """Put in front of an optimizer's class."""

    _shares: ShardedStep
    _waiting: Waiting  # state of parameters that have no parts yet
    _followed: str  # the name of the membership for whose ranks the state is divided
    _gathered: Mapping[Tensor, Mapping[str, Any]] | None  # the whole state, between two memberships

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._flush()
        model = self._shares.members.model
        if model.repeats_step:
            return loss
        self._follow_members()
        behind = self._shares.behind
        with torch.no_grad():
            if behind is None or not self._may_defer():
                try:
                    self._shares.step(functools.partial(self._run, self.param_groups))
                except RuntimeError as error:
                    if not model.is_recoverable(error):
                        raise
                    forget_frames(error)
            else:
                groups = [
                    {**settings_of(group), "params": list(group["params"])} for group in self.param_groups
                ]
                self._shares.step_behind(functools.partial(self._run, groups), behind)
        return loss

    def _may_defer(self) -> bool:
        """Return whether nothing needs the whole step here: no hooks, and no scaler within the optimizer."""
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (
            not hooks
            and getattr(self, "grad_scale", None) is None
            and getattr(self, "found_inf", None) is None
        )

    def _flush(self) -> None:
        """Complete the steps behind the forward."""
        if self._shares.behind is not None:
            self._shares.behind.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        behind = self._shares.behind
        if behind is None or not behind.has_outstanding:
            super().zero_grad(set_to_none)
            return
        for parameter in parameters_of(self):  # the step has taken the gradients of those that are under way
            if behind.overlap.is_outstanding(parameter):
                continue
            if not set_to_none:
                with torch._C.DisableTorchFunctionSubclass():  # this rank may have a part
                    gradient = parameter.grad
                if gradient is not None:
                    gradient.detach_().zero_()
            else:
                parameter.grad = None

    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True

    def _follow_members(self) -> None:
        """Divide what is not divided yet; among other ranks, if these have changed. Collective then."""
        self._shares.follow(parameters_of(self))
        if (members := self._shares.members).name != self._followed:
            move(self._shares, self.__dict__["state"], self._waiting)
            self._followed = members.name
        divide_waiting(self._shares, self.__dict__["state"], self._waiting)

    def _run(self, groups: Sequence[Mapping[str, Any]], parts: Sequence[tuple[int, Parameter]]) -> None:
        """Run the optimizer's own step over these parts, with the settings of these groups. On any thread."""
        own: list[list[Tensor]] = [[] for _ in groups]
        group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        for index, part in parts:
            own[group_of[index]].append(part)
        plain = self._kind.step
        if getattr(plain, "hooked", False):  # rule 4
            plain = inspect.unwrap(plain, stop=lambda each: not getattr(each, "hooked", False))
        self._run_groups(
            [{**group, "params": members} for group, members in zip(groups, own, strict=True) if members],
            plain,
        )

    def _check_state(self) -> None:
        if any(map(len, self.__dict__["state"].values())):
            num_ranks = self._shares.num_ranks
            raise ConfigurationError(
                f"this rank has one part of the state of this {type(self).__name__}, which is sharded: saving it would "
                f"lose {num_ranks - 1} of {num_ranks} parts. Call paceline.optim.full_state_dict(optimizer) on every "
                "rank, and save what rank 0 gets. Or give paceline.optim.sharded_state_dict(optimizer, model) to "
                "torch.distributed.checkpoint."
            )

    def _full_state(self) -> dict[str, Any] | None:
        self._flush()
        self._follow_members()
        return full_state(self._shares, self.__dict__["state"], self._waiting, self.param_groups)

    def own_parts(self, moves: bool) -> list[OwnPart]:
        """Return this rank's parts and their state. Local, except if the state `moves` to other ranks.

        Without `moves` the parts are those for which state is about to be loaded.
        """
        self._flush()
        if moves:
            self._follow_members()
        else:
            self._divide_without_state()
        return own_parts(self._shares, self.__dict__["state"], self._waiting)

    def _divide_without_state(self) -> None:
        self._shares.follow(parameters_of(self))
        if self._shares.members.name != self._followed:
            self._shares.divide_again()
            self._followed = self._shares.members.name

    # ---- if ranks come and go (`paceline.Elastic`)

    def keep_gradients_whole(self) -> None:
        """Have every rank receive all gradients, from the next backward on. Local; on every rank."""
        self._shares.keep_gradients_whole()

    @property
    def divided(self) -> list[Parameter]:
        """Return the parameters that have parts, on any rank."""
        left_out = {*self._shares.undivided}
        return [each for index, each in enumerate(self._shares.parameters) if index not in left_out]

    def gather_whole(self) -> None:
        """Let every rank hold the whole state until `divide_among_members`. Collective; blocks."""
        shares = self._shares
        found = state_of_all(shares, self.__dict__["state"], self._waiting)
        self._gathered = {shares.parameters[index]: kept for index, kept in found.items()}

    def whole(self, parameter: Parameter) -> Mapping[str, Any] | None:
        """Return what was gathered of a parameter's state; None if nothing was. Local."""
        return None if self._gathered is None else self._gathered.get(parameter)

    def held(self, parameter: Parameter, part: Part | None) -> Mapping[str, Any]:
        """Return what this rank keeps for a part of a parameter, or for one without parts; nothing is copied. Local."""
        if part is not None:
            found: Mapping[str, Any] = self.__dict__["state"].get(self._shares.parts[part], {})
            return found
        waiting = (
            kept for index, kept in self._waiting.items() if self._shares.parameters[index] is parameter
        )
        return next(waiting, {})

    def held_parts(self) -> list[tuple[Parameter, Part, bool]]:
        """Return each part of this rank with its parameter, and whether it is all of that. Local."""
        shares = self._shares
        return [(shares.parameters[each.index], each, shares.is_whole(each.index)) for each in shares.parts]

    def hold_whole(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Hold this whole state, by parameter and in its own dtypes, until `divide_among_members`. Local."""
        self._shares.end_failed_step()
        self._gathered = state

    def _cut_gathered(self, whole: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._divide_without_state()
        self._gathered, shares = None, self._shares
        packed = {index: whole[each] for index, each in enumerate(shares.parameters) if each in whole}
        given = {"state": packed, "param_groups": packed_groups(self.param_groups)}
        cut, _, self._waiting = cut_state(shares, self.param_groups, given)
        own = {part: cut["state"][n] for n, part in enumerate(shares.parts.values()) if n in cut["state"]}
        self.__dict__["state"] = defaultdict(dict, own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's parts of a state that is whole, or that `sharded_state_dict` returned. Local."""
        self._flush()
        self._divide_without_state()
        cut, parts, self._waiting = cut_state(self._shares, self.param_groups, state_dict)
        plain = ordinary(self._kind, {**self.__dict__, "param_groups": parts, "state": {}})
        plain.load_state_dict(cut)
        for group, loaded in zip(self.param_groups, plain.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        self.__dict__["state"] = plain.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _owners[parameter] = weakref.ref(self)
