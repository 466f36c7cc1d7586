"""`patch_torch`: torch's name DistributedDataParallel stands for ours, also where it has been imported already.

Rules
1. The stand-in is a subclass of ours. So what it makes is a Paceline module and also a torch one, as ours is a subclass
   of torch's.
2. `isinstance(x, DistributedDataParallel)` under a patch asks what it asked before: is x wrapped by torch's class or a
   subclass? So a model that was wrapped before the patch is still recognised.
3. torch's own modules, and ours, keep torch's class, except the two places that people import it from. Every module
   of other packages that holds it, under whatever name, holds the stand-in while there is a patch.
4. The last `undo` puts torch's class back everywhere; models that were wrapped meanwhile stay ours.
"""

from __future__ import annotations

import functools
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP
from typing_extensions import Self

from paceline import reductions
from paceline.compression import Compressor
from paceline.ddp import DistributedDataParallel as OurDDP
from paceline.reductions import Reduction

_HOMES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
_OTHERS_OF_TORCH = ("torch.", "paceline.")

_patches: list[Patch] = []
"""Those that have not been undone; the last one's arguments count."""


class Patch:
    """The effect of `patch_torch`, until `undo`; a context manager that undoes it at its end."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        _patches.append(self)
        _replace(TorchDDP, DistributedDataParallel)

    def undo(self) -> None:
        """Put torch's class back, unless another patch is in force. A second call does nothing."""
        if self in _patches:
            _patches.remove(self)
            if not _patches:
                _replace(DistributedDataParallel, TorchDDP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_torch(
    *,
    reduction: str | Callable[[], Reduction] | None = None,
    compression: str | Compressor | Callable[[], Reduction] | None = None,
) -> Patch:
    """Make `torch.nn.parallel.DistributedDataParallel` be Paceline's, for all code that wraps models by that name.

    Call it once before the model is wrapped, or use it as a context manager around what wraps it. Modules that have
    imported the class already, under whatever name, get Paceline's too.

    Limits: a reference that is not a module's attribute (a default argument, a base class, a local variable) stays
    torch's. Torch's own callers of the class (`torch.distributed._composable.replicate`) stay torch's.

    Args:
        reduction: The wrapper's `reduction`, if the script gives neither it nor `compression`. A name, or a function
            that makes one for each module that is wrapped.
        compression: The same for `compression`: a name, a compressor, or a function that makes a reduction.

    Returns:
        The patch; `undo()`, or the end of its `with` block, puts torch's class back.

    Contract:
        Local; every rank must do the same. Wrapping is collective.

    Raises:
        ConfigurationError: A name that is none, or both arguments where only one can say how gradients are combined.
    """
    reductions.choose_reduction(_make(reduction), _make(compression))
    given = {"reduction": reduction, "compression": compression}
    return Patch({name: value for name, value in given.items() if value is not None})


def _make(value: Any) -> Any:
    """Make a reduction for one wrapper, because two wrappers must not share its state."""
    return value() if callable(value) else value


def _replace(old: type, new: type) -> None:
    for module, name in list(_holders(old)):
        setattr(module, name, new)


def _holders(held: type) -> Iterator[tuple[Any, str]]:
    """Yield every module of Python that has `held` as an attribute, and the attribute's name."""
    for module_name, module in list(sys.modules.items()):
        if not hasattr(module, "__dict__"):
            continue  # None, or any object put there
        if module_name.startswith(_OTHERS_OF_TORCH) and module_name not in _HOMES:
            continue
        # The dictionary itself: reading attributes would wake modules that import lazily.
        yield from ((module, name) for name, value in list(vars(module).items()) if value is held)


class _Recognising(ABCMeta):  # torch's class has that metaclass, because it is a Joinable
    """The metaclass of the stand-in, with which `isinstance` and class attributes work as for torch's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Subclass checks stay as they are: an abstract class also asks its subclasses, and ours would get the answer.
        if cls is DistributedDataParallel:
            return isinstance(instance, TorchDDP)
        return super().__instancecheck__(instance)

    def __setattr__(cls, name: str, value: Any) -> None:
        # torch's forward says so which module runs, by the name that now is the stand-in's.
        if name == "_active_ddp_module":
            TorchDDP._active_ddp_module = value
        else:
            super().__setattr__(name, value)


class DistributedDataParallel(OurDDP, metaclass=_Recognising):
    """The class behind torch's name under a patch: Paceline's, with the patch's arguments if the caller gave none."""

    @functools.wraps(OurDDP.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _patches and kwargs.get("reduction") is None and kwargs.get("compression") is None:
            kwargs.update({name: _make(value) for name, value in _patches[-1].defaults.items()})
        super().__init__(*args, **kwargs)
