"""Changes of a model for large minibatches: initial values, and batch normalisation over a fixed number of samples.

The n of batch normalisation belongs to the loss, not to the machine: it must stay the same when the batch grows.
Between ranks it does by itself, as each normalises its own samples. Within a rank that trains more than n samples at
once, `GhostBatchNorm` cuts them into groups of n ("ghost batches").
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ConfigurationError
from paceline.given import number


def zero_init_residual(module: Module, *names: str) -> list[str]:
    """Clear the scale of the last normalisation of every residual block, so that each block begins as its shortcut.

    Args:
        module: The model on its device, before wrapping. Mutated.
        names: Names of the scales, with `*` for any part: "*.bn2.weight" for torchvision's ResNet-18 and 34,
            "*.bn3.weight" for its larger ones.

    Returns:
        Names of the parameters that are zero now, in the order of the modules.

    Raises:
        ConfigurationError: A name fits no scale of a normalisation; nothing was changed.

    Source:
        Goyal et al. 2017, section 5.1.
    """
    scales = {name: parameter for name, parameter in module.named_parameters() if parameter.ndim == 1}
    found = [name for name in scales if any(fnmatchcase(name, each) for each in names)]
    for each in names:
        if not any(fnmatchcase(name, each) for name in found):
            raise ConfigurationError(
                f"zero_init_residual: {each!r} fits no parameter of one dimension in this {type(module).__name__}. "
                f"Give names of scales. This model has {', '.join(list(scales)[:8]) or 'none'}, ..."
            )
    with torch.no_grad():
        for name in found:
            scales[name].zero_()
    return found


def init_output_layer(module: Module, std: float = 0.01) -> str:
    """Draw the weights of the last linear layer from N(0, std²) and clear its bias; return its name.

    Raises:
        ConfigurationError: There is no linear layer, or `std` is negative.

    Source:
        Goyal et al. 2017, section 5.1.
    """
    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ConfigurationError(
            f"this {type(module).__name__} has no torch.nn.Linear to initialise as its output layer. Leave "
            "init_output_layer out."
        )
    if not number(std) >= 0:
        raise ConfigurationError(f"std={std!r} is not a standard deviation. The paper's is 0.01.")
    name, layer = linear[-1]
    nn.init.normal_(layer.weight, 0.0, std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return str(name)


class GhostBatchNorm(_BatchNorm):
    """Batch normalisation of each group of `num_samples` consecutive samples by itself.

    The running statistics move once per step, by the mean over the groups. So they do not depend on the number of
    groups. In evaluation it is ordinary batch normalisation. Same parameters, buffers and `state_dict` as torch's.

    Args:
        num_features: Channels.
        num_samples: n; 32 in the paper. Training batches must be a multiple of it.
        eps, momentum, affine, track_running_stats: As torch's.

    Raises:
        ConfigurationError: A training batch is not a multiple of `num_samples`.

    Source:
        Goyal et al. 2017, section 2.3; Hoffer et al. 2017, section 4, for the groups.
    """

    def __init__(
        self,
        num_features: int,
        num_samples: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if not (number(num_samples) >= 1 and number(num_samples) % 1 == 0):
            raise ConfigurationError(
                f"num_samples={num_samples!r} has no statistics. Give the samples that are normalised together, such "
                "as 32."
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.num_samples = num_samples

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_samples={self.num_samples}"  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalise (B, C, ...); in training B is a multiple of `num_samples`."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        if input.size(0) % self.num_samples or input.size(0) == 0:
            raise ConfigurationError(
                f"a batch of {input.size(0)} samples cannot be cut into groups of {self.num_samples} for "
                "GhostBatchNorm. Make the local batch a multiple of num_samples, and leave out what remains at the "
                'end of an epoch (drop_last=True, or GlobalShuffle(last="drop")).'
            )
        groups = input.split(self.num_samples)
        shape = (len(groups), self.num_features)
        means = input.new_zeros(shape, dtype=self._statistics_dtype(input)).contiguous()
        variances = torch.zeros_like(means)
        outputs = [
            # With momentum 1 torch writes the group's own mean and (unbiased) variance into the rows.
            functional.batch_norm(
                group, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
            for group, mean, variance in zip(groups, means, variances, strict=True)
        ]
        self._track(means.mean(0), variances.mean(0))
        return torch.cat(outputs)

    def _statistics_dtype(self, x: Tensor) -> torch.dtype:
        if self.running_mean is not None:
            return self.running_mean.dtype
        return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        fresh = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, fresh)
        self.running_var.lerp_(variance, fresh)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ConfigurationError(
                f"GhostBatchNorm normalises (B, C) or (B, C, ...), but got {tuple(input.shape)}."
            )


def convert_ghost_batchnorm(module: Module, num_samples: int) -> Module:
    """Replace every batch-norm layer of `module`, which is changed, by a ghost one; returns the result.

    Parameters, running statistics and modes stay.

    Raises:
        ConfigurationError: There is none; or one is synchronized over ranks, which is the opposite. Nothing was
            changed.
    """
    found = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if not found:
        raise ConfigurationError(
            f"this {type(module).__name__} has no batch normalisation to convert. Other normalisations do not depend "
            "on the batch and need nothing."
        )
    if any(isinstance(part, torch.nn.SyncBatchNorm) for part in found):
        raise ConfigurationError(
            "a SyncBatchNorm takes its statistics over all ranks; ghost batches are for statistics that do not "
            "depend on the number of ranks. Convert to one or the other."
        )
    return _converted(module, num_samples)


def _converted(module: Module, num_samples: int) -> Module:
    if isinstance(module, _BatchNorm):
        ghost = GhostBatchNorm(
            module.num_features,
            num_samples,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        if module.affine:
            ghost.weight, ghost.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(ghost, name, getattr(module, name))
        return ghost.train(module.training)
    for name, child in list(module.named_children()):
        converted = _converted(child, num_samples)
        if converted is not child:
            module.add_module(name, converted)
    return module
