"""`ServerOptimizer`: parameter servers step the optimizer, and ranks install the stepped parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline_servers.ranks.servers_mean import ParameterServers
from paceline_servers.ranks.stepped import SteppedModel
from paceline_servers.stepping import ELEMENTWISE


class ServerOptimizer(Optimizer):
    """An optimizer that runs on the servers of a model: each steps its share of the parameters. Ranks hold no state.

    After any number of steps the parameters are bitwise those of `optimizer` with the same gradients on a rank.

    Limits first: only optimizers that treat every element by itself are possible: SGD, Adam, AdamW, Adamax, NAdam,
    RAdam, Adagrad, Adadelta, RMSprop, Rprop, ASGD. After backward `.grad` is None on every rank, so gradients cannot
    be clipped, scaled (GradScaler) or logged there. They can with `ParameterServers()` and the optimizer on the ranks.
    Settings are read when backward begins. Servers keep parameters and state twice, so that a step can be taken back.

    Args:
        optimizer: An optimizer over all trained parameters of the model. The servers use its class and settings.
            Schedulers may be given either it or this object.
        model: The model, made by `DistributedDataParallel(module, reduction=ParameterServers())`.

    Attributes:
        optimizer: The given optimizer; it is never stepped.

    Contract:
        The constructor: local, on every rank, before the first backward.

    Raises:
        ConfigurationError: The optimizer is of another class or leaves parameters out; the model has no servers, or has
            an optimizer on them already.
    """

    def __init__(self, optimizer: Optimizer, model: Any) -> None:
        reduction = getattr(model, "reduction", None)
        if not isinstance(reduction, ParameterServers):
            raise ConfigurationError(
                f"ServerOptimizer(optimizer, model): the model is a {type(model).__name__} with the reduction "
                f"{reduction!r}. Wrap it as DistributedDataParallel(module, reduction=ParameterServers())."
            )
        _check(optimizer, reduction)
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        parameters = list(reduction.named_parameters.values())
        self._stepped = SteppedModel(optimizer, parameters, is_first=model.process_group.rank() == 0)
        self._stepped.settings()  # raises for settings that cannot be sent
        reduction.step_by(self._stepped)

    def __repr__(self) -> str:
        return f"ServerOptimizer({self.optimizer!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigurationError(
            "a ServerOptimizer belongs to one model's servers and cannot be copied. Copy the module, wrap the copy "
            "with ParameterServers() and make another."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Install the parameters that the servers have stepped in the last backward, if there was one. Local.

        Args:
            closure: Called first, with gradients enabled. Its backward is then the last one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepped.install()
        vars(self.optimizer)["_opt_called"] = True  # for a scheduler of the given optimizer
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients as torch does, and a step that was not installed, on the servers too. Local."""
        self._stepped.drop()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_stepped"):
            raise ConfigurationError(
                "a ServerOptimizer's servers know their parameters from the first step on, and no group can be added. "
                "Give the optimizer all groups before it is wrapped."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of whole parameters. The plain optimizer can load it, and any number of servers.

        Contract:
            Local: any rank may call it alone.  Blocks: until every server has answered.
        """
        settings = self.optimizer.state_dict()["param_groups"]
        return {"state": self._stepped.fetch(), "param_groups": settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or the plain optimizer's state. The same on every rank; does not block.

        Raises:
            ConfigurationError: It is the state of other parameters; nothing was changed.
        """
        self._check_state(state_dict)
        self.optimizer.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.param_groups = self.optimizer.param_groups
        self._stepped.load(state_dict["state"])

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        try:
            sizes = [len(group["params"]) for group in state_dict["param_groups"]]
            state = state_dict["state"]
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                "this is not the state of an optimizer, which holds state and param_groups. Load what its "
                "state_dict() returned."
            ) from error
        members = [p for group in self.param_groups for p in group["params"]]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ConfigurationError(
                f"the state is of groups of {sizes} parameters, and this optimizer has "
                f"{[len(group['params']) for group in self.param_groups]}. Load it with the groups that it "
                "was saved with."
            )
        for index, own in state.items():
            for name, item in own.items():
                if torch.is_tensor(item) and item.dim() and item.shape != members[index].shape:
                    raise ConfigurationError(
                        f"the state {name} of parameter {index} has the shape {tuple(item.shape)}, and the parameter "
                        f"{tuple(members[index].shape)}. Load it with the model that it was saved with."
                    )


def _check(optimizer: Optimizer, reduction: ParameterServers) -> None:
    if type(optimizer) not in [getattr(torch.optim, name) for name in ELEMENTWISE]:
        raise ConfigurationError(
            f"servers do not step {type(optimizer).__name__}: a parameter is cut among them, which only optimizers "
            f"that treat every element by itself allow: {', '.join(ELEMENTWISE)}. Any other steps on the ranks: leave "
            "out ServerOptimizer, and keep ParameterServers()."
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in reduction.named_parameters.values()}
    missing = [name for name, p in reduction.named_parameters.items() if id(p) not in stepped]
    others = [
        tuple(p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in trained
    ]
    if missing or others:
        raise ConfigurationError(
            f"ServerOptimizer needs exactly the model's trainable parameters. Missing: {missing[:5]}. Not part of "
            f"the model: {len(others)} parameters. Freeze parameters that are not to be trained."
        )
    complex_ones = [name for name, p in reduction.named_parameters.items() if p.is_complex()]
    if complex_ones:
        raise ConfigurationError(
            f"servers do not step complex parameters, which {complex_ones[0]} is. Leave out ServerOptimizer, and keep "
            "ParameterServers()."
        )
