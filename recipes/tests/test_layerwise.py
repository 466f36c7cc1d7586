"""LARS and LAMB equal ten-line references in float64, in every combination of their options."""

import copy
import io
import itertools
import math

import pytest
import torch
from torch import nn

from harness.models import digest, generator
from paceline.errors import ConfigurationError
from paceline_recipes import LAMB, LARS, layerwise
from paceline_recipes.layerwise import SMALL_ELEMENTS, norms

SHAPES = [(3, 5), (7,), (), (2, 3, 4), (SMALL_ELEMENTS + 1,), (0, 3), (300, 65), (4, 1)]


def lars(w, g, s, lr, m, b, h, nesterov, most, layerwise, sign):
    """The ten lines: one parameter, one step."""
    ratio = h * w.norm() / (g.norm() + b * w.norm())
    if w.norm() == 0 or g.norm() == 0:
        ratio = 1.0
    ratio = min(ratio, math.inf if most is None else most) if layerwise else 1.0
    u = ratio * (sign * g + b * w)
    s["v"] = m * s.get("v", 0) + u
    return w - lr * (u + m * s["v"] if nesterov else s["v"])


def lamb(w, g, s, lr, betas, eps, b, corrects, bounds, most, layerwise, sign):
    """The ten lines."""
    s["t"] = s.get("t", 0) + 1
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * sign * g
    s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g**2
    c1, c2 = ((1 - beta ** s["t"]) if corrects else 1.0 for beta in betas)
    u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + eps) + b * w
    norm = min(max(w.norm(), bounds[0]), bounds[1])
    ratio = norm / u.norm() if norm != 0 and u.norm() != 0 else 1.0
    ratio = min(ratio, math.inf if most is None else most) if layerwise else 1.0
    return w - lr * ratio * u


def gradients_of(step, shapes, dtype):
    return [
        torch.randn(shape, generator=generator(step, i), dtype=torch.float64).to(dtype)
        for i, shape in enumerate(shapes)
    ]


def make_parameters(shapes, dtype=torch.float64):
    parameters = [nn.Parameter(value) for value in gradients_of(99, shapes, dtype)]
    parameters[1].data.zero_()  # a bias at its start: no norm
    return parameters


def run(optimizer, parameters, steps, shapes=SHAPES):
    """Train; parameter 3 has no gradient in every other step, parameter 4 a gradient of zeros."""
    for step in steps:
        for index, (parameter, gradient) in enumerate(
            zip(parameters, gradients_of(step, shapes, parameters[0].dtype), strict=True)
        ):
            parameter.grad = None if index == 3 and step % 2 else gradient * (index != 4)
        optimizer.step()


def worst_error(optimizer, step_one, dtype=torch.float64):
    """The largest difference to the reference, relative to the largest value, after five steps."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mirror = [p.detach().double().clone() for p in parameters]
    states = [{} for _ in parameters]
    for step in range(5):
        run(optimizer, parameters, [step])
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                group = optimizer.param_groups[0]
                mirror[index] = step_one(mirror[index], parameter.grad.double(), states[index], group)
    pairs = [(p.detach().double(), q) for p, q in zip(parameters, mirror, strict=True) if p.numel()]
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)


LARS_OPTIONS = [
    {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov, **more}
    for momentum, decay, nesterov in itertools.product([0.0, 0.9], [0.0, 0.02], [False, True])
    if momentum or not nesterov
    for more in ({}, {"max_trust_ratio": 0.004}, {"layerwise": False}, {"maximize": True})
]
LAMB_OPTIONS = [
    {"weight_decay": decay, **more}
    for decay in (0.0, 0.02)
    for more in (
        {},
        {"bias_correction": False},
        {"max_trust_ratio": 0.9},
        {"weight_norm_bounds": (0.5, 4.0)},
        {"layerwise": False},
        {"maximize": True},
        {"betas": (0.0, 0.0)},
    )
]


def lars_step(w, g, s, o):
    sign = -1 if o["maximize"] else 1
    return lars(
        w,
        g,
        s,
        o["lr"],
        o["momentum"],
        o["weight_decay"],
        o["trust_coefficient"],
        o["nesterov"],
        o["max_trust_ratio"],
        o["layerwise"],
        sign,
    )


def lamb_step(w, g, s, o):
    sign = -1 if o["maximize"] else 1
    return lamb(
        w,
        g,
        s,
        o["lr"],
        o["betas"],
        o["eps"],
        o["weight_decay"],
        o["bias_correction"],
        o["weight_norm_bounds"],
        o["max_trust_ratio"],
        o["layerwise"],
        sign,
    )


@pytest.mark.parametrize("options", LARS_OPTIONS, ids=str)
def test_lars_is_its_reference(options):
    """Tensors of every shape and size, without norm, without gradient and with a gradient of zeros among them."""
    optimizer = LARS(make_parameters(SHAPES), lr=0.3, trust_coefficient=0.01, **options)
    assert worst_error(optimizer, lars_step) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("options", LAMB_OPTIONS, ids=str)
def test_lamb_is_its_reference(options, monkeypatch):
    """As LARS; here the parameters are taken in several batches."""
    monkeypatch.setattr(layerwise, "LARGE_ELEMENTS", 30)
    assert worst_error(LAMB(make_parameters(SHAPES), lr=0.1, **options), lamb_step) < 1e-13


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions(dtype, bound):
    """Norms of half precision are taken in a wider type; parameters of several dtypes live in one group."""
    for optimizer, step in (
        (LARS(make_parameters(SHAPES, dtype), lr=0.3), lars_step),
        (LAMB(make_parameters(SHAPES, dtype), lr=0.1), lamb_step),
    ):
        assert worst_error(optimizer, step) < bound
    big = [torch.full((40_000,), 400.0, dtype=torch.float16), torch.full((4,), 400.0, dtype=torch.float16)]
    assert norms(big)[0] == pytest.approx([80_000.0, 800.0], rel=1e-3)  # the first is no float16
    mixed = [
        nn.Parameter(torch.ones(3, dtype=kind)) for kind in (torch.float32, torch.float64, torch.bfloat16)
    ]
    optimizer = LARS(mixed, lr=100.0)
    for parameter in mixed:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(parameter.detach()[0] < 1 for parameter in mixed)


def test_the_papers_lars():
    """At a constant rate the rate may stand inside of the momentum, as in the paper's algorithm 1."""
    w = torch.randn(30, generator=generator(1), dtype=torch.float64)
    parameter, v = nn.Parameter(w.clone()), torch.zeros(30, dtype=torch.float64)
    optimizer = LARS([parameter], lr=2.0, weight_decay=0.01, trust_coefficient=0.02)
    for step in range(10):
        g = torch.randn(30, generator=generator(2, step), dtype=torch.float64)
        local_rate = 0.02 * w.norm() / (g.norm() + 0.01 * w.norm())
        v = 0.9 * v + 2.0 * local_rate * (g + 0.01 * w)
        w = w - v
        parameter.grad = g
        optimizer.step()
    assert (parameter.detach() - w).abs().max() < 1e-13


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_ratio_they_are_sgd_and_adamw(nesterov):
    """`layerwise=False` is what torch has."""
    pairs = [
        (LARS, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}),
        (LAMB, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-6}),
    ]
    for ours, theirs, options in pairs:
        parameters = [make_parameters(SHAPES), make_parameters(SHAPES)]
        run(ours(parameters[0], layerwise=False, **options), parameters[0], range(5))
        run(theirs(parameters[1], **options), parameters[1], range(5))
        for p, q in zip(*parameters, strict=True):
            assert torch.allclose(p, q, rtol=1e-12, atol=1e-13)


def test_the_step_is_a_fraction_of_the_norm():
    """What the papers are about: however a layer's gradient is scaled, its step has the same length."""
    for scale in (1e-6, 1.0, 1e6):
        for optimizer in (LARS, LAMB):
            parameter = nn.Parameter(torch.randn(50, generator=generator(3), dtype=torch.float64))
            before = parameter.detach().clone()
            parameter.grad = scale * torch.randn(50, generator=generator(4), dtype=torch.float64)
            options = {"trust_coefficient": 1.0} if optimizer is LARS else {"eps": 0.0}
            optimizer([parameter], lr=0.01, **options).step()
            assert (parameter.detach() - before).norm() / before.norm() == pytest.approx(0.01)


@pytest.mark.parametrize("size", [SMALL_ELEMENTS, SMALL_ELEMENTS + 1, layerwise.LARGE_ELEMENTS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_any_scale(dtype, size):
    """Squares that overflow or vanish in the gradients' precision change no step: summed together, or one by one."""
    scales = [1e-28, 1e-25, 3e-23, 1e-22, 1e-19, 1.0, 1e18, 1e25, 1e36]
    if dtype == torch.float64:
        scales += [1e-200, 1e-160, 1e160, 1e200]
    direction = torch.randn(size, generator=generator(5), dtype=torch.float64)
    direction[0] = 0.0  # times an infinite factor it would not be a number
    for momentum in (0.0, 0.9):
        parameters = [nn.Parameter(torch.randn(size, generator=generator(6)).to(dtype)) for _ in scales]
        before = parameters[0].detach().double().clone()
        for parameter, scale in zip(parameters, scales, strict=True):
            parameter.grad = (scale * direction).to(dtype)
        LARS(parameters, lr=1.0, momentum=momentum, trust_coefficient=0.01).step()
        for parameter in parameters:
            step = (parameter.detach().double() - before).norm() / before.norm()
            assert step == pytest.approx(0.01, rel=0.1 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("size", [50, SMALL_ELEMENTS + 1])
def test_lambs_range(size):
    """Steps are as long from 1e-34 to 1e20 in float32; a square that overflows holds its element for good."""
    direction = torch.randn(size, generator=generator(5))
    parameters = [nn.Parameter(torch.randn(size, generator=generator(6))) for _ in range(4)]
    before = parameters[0].detach().clone()
    optimizer = LAMB(parameters, lr=0.01)
    for parameter, scale in zip(parameters, (1e-34, 1.0, 1e20, 1.0), strict=True):
        parameter.grad = scale * direction
    parameters[3].grad[0] = 1e21
    optimizer.step()
    for parameter in parameters:
        assert (parameter.detach() - before).norm() / before.norm() == pytest.approx(0.01, rel=1e-3)
    for parameter in parameters:
        parameter.grad = direction
    optimizer.step()
    stands = parameters[3].detach() == before
    assert stands[0]
    assert stands.sum() == 1


def test_norms_at_the_ends():
    """Weights of any scale; what has no elements, is zero, infinite or no number; a factor that would be infinite."""
    for size in (5, SMALL_ELEMENTS + 1):
        ones = torch.ones(size)
        found = norms([1e30 * ones, 1e-40 * ones, 0 * ones, math.inf * ones, ones[:0]])[0]
        root = math.sqrt(size)
        assert found[:3] == pytest.approx([1e30 * root, 1e-40 * root, 0.0], rel=1e-4)
        assert found[3:] == [math.inf, 0.0]
        assert math.isnan(norms([math.nan * ones])[0][0])
        weight = nn.Parameter(1e30 * ones)
        weight.grad = 1e-40 * ones
        LARS([weight], lr=1.0).step()
        assert weight.isfinite().all()


GROUPED = [{"momentum": 0.5, "weight_decay": 0.1}, {"layerwise": False, "lr": 0.01, "nesterov": True}]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_state_goes_through_a_checkpoint(kind):
    """Five steps, saved and loaded into another object, and five more: bitwise ten steps; also after a deep copy."""
    groups = GROUPED if kind is LARS else [{"weight_decay": 0.1}, {"layerwise": False, "lr": 0.01}]

    def make():
        parameters = make_parameters(SHAPES, torch.float32)
        halves = [{"params": parameters[:4], **groups[0]}, {"params": parameters[4:], **groups[1]}]
        return parameters, kind(halves, lr=0.1)

    parameters, optimizer = make()
    run(optimizer, parameters, range(5))
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), parameters), file)
    run(optimizer, parameters, range(5, 10))
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    others, other = make()
    for parameter, value in zip(others, values, strict=True):
        parameter.data.copy_(value)
    other.load_state_dict(state)
    copied, copy_of_other = copy.deepcopy((others, other))
    run(other, others, range(5, 10))
    run(copy_of_other, copied, range(5, 10))
    assert digest(parameters) == digest(others) == digest(copied)


def test_closures_and_schedulers():
    """As every optimizer of torch's."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = LARS([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (LARS, {"lr": -1}, "lr=-1"),
        (LARS, {"lr": math.nan}, "lr=nan"),
        (LARS, {"momentum": -0.1}, "momentum=-0.1"),
        (LARS, {"trust_coefficient": -1}, "trust_coefficient=-1"),
        (LARS, {"max_trust_ratio": 0}, "max_trust_ratio=0"),
        (LARS, {"nesterov": True, "momentum": 0}, "nesterov=True needs momentum"),
        (LAMB, {"eps": -1}, "eps=-1"),
        (LAMB, {"weight_decay": math.inf}, "weight_decay=inf"),
        (LAMB, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        (LAMB, {"weight_norm_bounds": (2, 1)}, r"weight_norm_bounds=\(2, 1\)"),
    ],
)
def test_bad_settings(kind, options, words):
    """Refused when made, and in a group that is added later, which then is not."""
    with pytest.raises(ConfigurationError, match=words):
        kind([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ConfigurationError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_what_has_no_norm_is_refused(kind):
    """Sparse gradients, before anything was changed, and complex parameters."""
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(5, 3, sparse=True)
    optimizer = kind([dense, *embedding.parameters()], lr=0.1)
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="sparse gradient"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    with pytest.raises(ConfigurationError, match="is complex"):
        kind([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)


def test_elements_without_gradient_in_half_precision():
    """A dead unit's second moment is 0, and the reciprocal of eps is not a number of 16 bits."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float16))
    optimizer = LAMB([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.full_like(weight, 1e-3)
        weight.grad[0] = 0.0
        optimizer.step()
    assert weight.isfinite().all()
    assert torch.equal(weight[0], torch.ones_like(weight[0]))
    assert (weight[1:] < 1).all()
