"""Checks of a layer type: what it says of its shapes, and its layers' gradients, state, training and end."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from q4_conformance.checks.endurance import take_step, threads
from q4_conformance.contract.case import check, expect, within
from q4_conformance.outcome import FailureError, NotDeclaredError
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.layer_type import LayerSubject

_SEED = 20
_STEPS = 20
_LIVES = 8
_EXACT: dict[str, Any] = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}
_ROUNDED: dict[str, Any] = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
"""Four-bit layers take float32 at most, in which smaller differences drown."""


def _of_each_example(judge: Callable[[LayerSubject, Any], str]) -> Callable[[Case, LayerSubject], str]:
    """Return the check that judges each example by itself; its draws leave torch's generator as it was."""

    @threads(1)
    @torch.random.fork_rng(devices=())
    def run(_case: Case, subject: LayerSubject) -> str:
        if subject.lacks:
            raise NotDeclaredError(subject.lacks)
        seen = []
        for example in subject.examples:
            torch.manual_seed(_SEED)
            with within(f"layer type {subject.name!r}, options {dict(example.options)}"):
                seen.append(judge(subject, example))
        return "; ".join(seen)

    return run


@check("layer_shapes")
@_of_each_example
def _check_layer_shapes(subject: LayerSubject, example: Any) -> str:
    module = subject.make(example).eval()
    own = tuple(example.shape)
    others = (own[1:], *((*own[:at], size + 1, *own[at + 1 :]) for at, size in enumerate(own)))
    said = {shape: _said(subject, example, shape) for shape in (own, *others)}
    expect(said[own] is not None, "shape refuses the example's own")
    for shape, sizes in said.items():
        for batch in () if sizes is None else (1, 3):
            try:
                found = subject.call(module, subject.draw(example, batch, shape)).shape
            except PLUGIN_FAULTS as error:
                if shape == own:
                    raise
                rule = f"shape must raise ValueError for {[*shape]}, where the layer raises {describe_exception(error)}"
                expect(None not in said.values(), rule)  # a type that refuses none leaves it to its layers
                continue
            due = (batch, *(sizes or ()))
            is_right = len(found) == len(due) and all(b in {None, a} for a, b in zip(found, due, strict=True))
            expect(is_right, f"expected a result of shape {[*due]}, as its shape says, found {[*found]}")
    return f"{[*said.values()].count(None)} refused"


def _said(subject: LayerSubject, example: Any, shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
    try:
        return tuple(subject.layer_type.shape(shape, **example.options))
    except ValueError:
        return None
    except PLUGIN_FAULTS as error:
        raise FailureError(f"shape must raise ValueError for {[*shape]}: {describe_exception(error)}") from error


@check("layer_gradients")
@_of_each_example
def _check_layer_gradients(subject: LayerSubject, example: Any) -> str:
    """In eval mode gradients are what differences show: in float64 of input and parameters.

    Of a straight-through example, in float32, of the input alone; its parameters' gradients must be there and finite.
    Spikes have a surrogate's gradient, which no difference shows: it must be there, finite, and not zero everywhere.
    """
    dtype, limits = (torch.float32, _ROUNDED) if example.straight_through else (torch.float64, _EXACT)
    module = subject.make(example).eval().to(dtype)
    x = subject.draw(example, 2, example.shape)
    x = x.to(dtype).requires_grad_() if x.is_floating_point() else x
    if getattr(example, "surrogate", False):
        (slope,) = torch.autograd.grad(subject.call(module, x).sum(), x)
        expect(bool(torch.isfinite(slope).all()), "a surrogate gradient is not finite")
        expect(bool((slope != 0).any()), "no surrogate gradient reaches the input")
        return f"{slope.numel()} surrogate gradients"
    moved = [x] if x.requires_grad else []
    moved += [] if example.straight_through else [item for item in module.parameters() if item.requires_grad]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not a double precision")
        try:
            if moved:
                gradcheck(lambda *_: subject.call(module, x), moved, **limits)
        except GradcheckError as error:
            raise FailureError(f"a gradient is not what differences show: {error}") from error
    if example.straight_through:
        take_step(dict(module.named_parameters()), lambda: subject.call(module, x).square().sum(), "backward")
    return f"{sum(item.numel() for item in moved)} gradients"


def _train(subject: LayerSubject, module: torch.nn.Module, x: torch.Tensor, steps: int) -> list[float]:
    """Take steps towards a fixed target, and return the losses."""
    target = torch.randn_like(subject.call(module, x).detach())

    def loss_of() -> torch.Tensor:
        torch.manual_seed(_SEED)  # what a layer drops, it drops in every step
        return torch.nn.functional.mse_loss(subject.call(module, x), target)

    parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
    return [take_step(parameters, loss_of, f"step {step}", rate=1e-2) for step in range(steps)] if parameters else []


@check("layer_state")
@_of_each_example
def _check_layer_state(subject: LayerSubject, example: Any) -> str:
    module, x = subject.make(example).train(), subject.draw(example, 3, example.shape)
    _train(subject, module, x, 2)
    module.eval()
    fresh = subject.make(example).eval()
    fresh.load_state_dict(copy.deepcopy(module.state_dict()), strict=True)
    moved, other = copy.deepcopy(module), torch.bfloat16 if example.straight_through else torch.float64
    with torch.no_grad():
        y = subject.call(module, x)
        moved_y = subject.call(moved.to(other), x.to(other) if x.is_floating_point() else x)
        is_right = moved_y.dtype is other and bool(torch.isfinite(moved_y).all())
        expect(is_right, f"moved to {other}, the layer gives {moved_y.dtype}, or what is not finite")
        for what, twin in (
            ("a new layer with its state", fresh),
            ("a deep copy", copy.deepcopy(module)),
            ("a copy in float64 and back", copy.deepcopy(module).to(torch.float64).to(torch.float32)),
            ("the layer itself, called again,", module),
        ):
            expect(torch.equal(subject.call(twin, x), y), f"{what} gives other numbers than the trained layer")
    return f"{len(module.state_dict())} tensors"


@check("layer_training")
@_of_each_example
def _check_layer_training(subject: LayerSubject, example: Any) -> str:
    losses = _train(subject, subject.make(example).train(), subject.draw(example, 4, example.shape), _STEPS)
    if not losses:
        return "nothing to train"
    change = f"loss {losses[0]:.4g} to {losses[-1]:.4g}"
    expect(losses[-1] < losses[0], f"{_STEPS} steps took the {change}")
    return change


@check("layer_lifetime")
@_of_each_example
def _check_layer_lifetime(subject: LayerSubject, example: Any) -> str:

    def live() -> None:
        module, x = subject.make(example).train(), subject.draw(example, 3, example.shape)
        _train(subject, module, x, 2)
        subject.call(module.eval(), x)
        ends.append(weakref.ref(module))

    ends: list[weakref.ref[torch.nn.Module]] = []
    live()
    gc.collect()
    end_freeze = gc.freeze if gc.get_freeze_count() else gc.unfreeze  # what the caller froze stays so
    gc.freeze()  # what lives by now is not looked at again
    try:
        for _ in range(_LIVES):
            live()
        gc.collect()
        grown = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    finally:
        end_freeze()
    expect(not (alive := sum(end() is not None for end in ends)), f"{alive} of {len(ends)} layers live on")
    expect(grown < _LIVES, f"{grown} tensors live on after {_LIVES} layers")  # what is stored once is no leak
    return f"{len(ends)} layers gone"
