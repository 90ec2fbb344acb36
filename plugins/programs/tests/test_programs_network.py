"""Programs of networks: what torch's modules and third parties' emit, and when the modules run instead."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import q4core as q4
from q4_programs import Op, make_program
from tests.support.limits import scaled
from tests.support.programs import check_program as check

if TYPE_CHECKING:
    from q4_programs import ProgramBuilder, Value

X = torch.randn(3, 8)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(8, 5),
        nn.Linear(8, 5, bias=False),
        nn.RMSNorm(8),
        nn.RMSNorm(8, elementwise_affine=False),
        nn.LayerNorm(8),
        nn.LayerNorm(8, bias=False),
        nn.ReLU(),
        nn.SiLU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.Softmax(-1),
        nn.Softmax(1),
        nn.Dropout(0.5),
        nn.Identity(),
        nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_give_the_numbers_of_their_modules(layer: nn.Module) -> None:
    """Each layer of torch's that is an operation, or several, runs as one program."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    check(layer, X)
    if not isinstance(layer, nn.Softmax):
        check(layer, X[0])
        check(layer, torch.randn(2, 3, 8))


def test_flatten_and_embedding() -> None:
    """Shapes are preserved: rows are all sizes but the last."""
    check(nn.Sequential(nn.Flatten(), nn.Linear(24, 5)), torch.randn(2, 3, 8))
    check(nn.Embedding(9, 4), torch.randint(0, 9, (2, 3)))


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False, "batch_first": True}])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_step_with_its_state(kind: Any, options: dict[str, Any]) -> None:
    """Given a state, a recurrent layer returns the next one, in both directions and either order of sizes."""
    layer = kind(8, 6, 2, **options)
    state = torch.randn(4 if options.get("bidirectional") else 2, 3, 6)
    x = torch.randn(3, 4, 8) if options.get("batch_first") else torch.randn(4, 3, 8)
    check(layer, x)
    check(layer, x, (state, 2 * state) if kind is nn.LSTM else state)
    check(nn.RNN(8, 6, nonlinearity="relu"), torch.randn(4, 3, 8))


class Scale(nn.Module):
    """A third party's layer, which emits by a method."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the factor."""
        return x * self.factor

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit the product."""
        return builder.step(Op.MULTIPLY, x, builder.bound(self.factor, "factor"))


def test_third_parties_layers_emit() -> None:
    """By a method of the module; parameters may change their numbers."""
    check(nn.Sequential(Scale(8), nn.Tanh()), X)
    scale = Scale(8).eval()
    program = make_program(scale, X)
    with torch.no_grad():
        scale.factor.mul_(3)
        assert torch.equal(program(X), scale(X))


class Changed(Scale):
    """A subclass with another result than its parent's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the factor."""
        return x + self.factor


class Failing(nn.Identity):
    """An emitter with a bug."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Divide by zero."""
        del builder
        return x.shape[1] / 0  # type: ignore[return-value]  # on purpose


class Empty(Failing):
    """An emitter that gives no value."""

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Return nothing."""
        del builder, x
        return None  # type: ignore[return-value]  # on purpose


class Misfit(Failing):
    """An emitter whose step does not fit its views."""

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Multiply by a row of another width."""
        return builder.step(Op.MULTIPLY, x, builder.columns(x, 0, 3))


def hooked() -> nn.Module:
    """Return a layer with a hook."""
    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda _module, x: (x[0] + 1,))
    return layer


def patched() -> nn.Module:
    """Return a layer whose forward was replaced."""
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign, assignment]  # on purpose
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Softplus(), "1: Softplus emits nothing"),
        (Changed(8), "1: Changed emits nothing"),
        (Failing(), "1: its emitter raised ZeroDivisionError"),
        (Empty(), "1: its emitter gave NoneType"),
        (Misfit(), "program step 0, multiply (1): buffer 'input' must be"),
        (hooked(), "1: it has a hook"),
        (patched(), "1: its forward was replaced"),
        (nn.Linear(8, 8).double(), "1: weight is torch.float64"),
        (nn.LayerNorm((3, 8)), "1: it norms [3, 8] of [3, 8], not rows"),
        (nn.Softmax(0), "1: softmax over dim 0"),
        (nn.LSTM(8, 8, proj_size=4), "1: a projection"),
        (nn.RNN(8, 8), "1: x has the shape [3, 8]"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "1: ParametrizedLinear emits nothing"),
        (nn.Embedding(5, 8, max_norm=1.0), "1: max_norm"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_what_is_not_emitted_runs_as_modules(layer: nn.Module, reason: str) -> None:
    """The record names the module and why; where the modules run at all, the result is theirs."""
    model = nn.Sequential(nn.Identity(), layer).eval()
    program = make_program(model, X)
    assert program.record.backend is None
    assert reason in program.record.reasons[0]
    if reason.startswith(("1: Softplus", "1: Changed", "1: its", "1: it has")):
        with torch.no_grad():
            assert torch.equal(program(X), model(X))


@pytest.mark.parametrize(
    ("model", "examples", "rule"),
    [
        (None, (X,), "model must be a torch module, got 'NoneType'"),
        (nn.ReLU, (X,), "model must be a torch module, got 'type'"),
        (nn.ReLU(), (3.5,), "examples must be tensors, or tuples of them, got 'float'"),
        (nn.GRU(8, 8), (X, (X, None)), "examples must be tensors, or tuples of them, got 'NoneType'"),
        (nn.ReLU(), (), "examples must be what ReLU.forward takes (missing a required argument: 'input')"),
        (nn.ReLU(), (X, X), "examples must be what ReLU.forward takes (too many positional arguments)"),
    ],
    ids=["none", "class", "number", "nested", "few", "many"],
)
def test_what_no_network_takes(model: Any, examples: tuple[Any, ...], rule: str) -> None:
    """A model that is none, and examples that its forward can't take, are typed errors when the program is made."""
    with pytest.raises(q4.InputError, match=re.escape(rule)):
        make_program(model, *examples)


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        ((X,), "1: it takes tensors, not tuples of them"),
        (X[:, :5], "program step 0, linear (1): buffer '1 weight' must be of 5 columns, got 8"),
    ],
    ids=["tuple", "width"],
)
def test_reasons_name_no_internals(example: Any, reason: str) -> None:
    """Examples that don't fit a layer are reported in sizes and labels, without names of our code."""
    record = make_program(nn.Sequential(nn.Identity(), nn.Linear(8, 8)).eval(), example).record
    assert record.reasons == (reason,)


def test_a_global_hook() -> None:
    """A hook on all modules counts as one on each."""
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert "it has a hook" in make_program(nn.ReLU().eval(), X).record.reasons[0]


def test_results_are_the_caller_s() -> None:
    """A later run does not change what an earlier one gave."""
    program = make_program(nn.Linear(8, 4).eval(), X)
    with torch.no_grad():
        first = program(X)
        before = first.clone()
        program(X + 1)
    assert torch.equal(first, before)


def test_memory_that_moved_is_an_error() -> None:
    """A parameter whose memory was exchanged is reported, not read."""
    layer = nn.Linear(8, 4).eval()
    program = make_program(layer, X)
    layer.weight.data = torch.zeros(4, 8)
    with torch.no_grad(), pytest.raises(q4.LifecycleError, match="buffer 'weight' of program 'Linear' was resized"):
        program(X)


def test_a_token_out_of_range() -> None:
    """A token that is no row is refused."""
    program = make_program(nn.Embedding(9, 4).eval(), torch.tensor([1, 2]))
    with torch.no_grad(), pytest.raises(q4.InputError, match="token, position or clock must be"):
        program(torch.tensor([1, 9]))


def small() -> nn.Sequential:
    """Return a network in eval mode."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8)).eval()


def test_threads_get_their_own_answers() -> None:
    """Threads that call one program take turns: none reads another's results."""
    model = small()
    wrong: list[int] = []
    program = make_program(model, X)

    def work(seed: int) -> None:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x)
            wrong.extend(seed for _ in range(300) if not torch.allclose(program(x), expected, atol=1e-5))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_forked_during_a_run_does_not_wait() -> None:
    """A lock that another thread of the parent holds is none of the child's."""
    program = make_program(small(), X)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with program._bound.lock:  # type: ignore[union-attr]  # it is bound
            held.set()
            done.wait(scaled(60))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(scaled(60))
    child = os.fork()
    if not child:
        with torch.no_grad():
            os._exit(0 if program(X).isfinite().all() else 1)
    try:
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            threading.Event().wait(0.1)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a lock of its parent")
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.append(nn.ReLU()), "a module or parameter was added, replaced or removed"),
        (lambda model: setattr(model[1], "forward", torch.relu), "an attribute of a module was added or removed"),
        (lambda model: model[2].train(), "training mode"),
    ],
)
def test_a_changed_network_is_never_served_by_an_old_program(change: Any, reason: str) -> None:
    """What was appended, replaced on one module, or set to training runs, and the record says why."""
    model = small()
    program = make_program(model, X)
    change(model)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = model(X)
        torch.manual_seed(3)
        assert torch.equal(program(X), expected)
    assert reason in program.record.reasons[-1]


def test_a_program_made_in_inference_mode_runs_outside_it() -> None:
    """Its memory is ordinary, and strides of the examples do not count."""
    model = small()
    with torch.inference_mode():
        program = make_program(model, torch.randn(8, 3).t())
    with torch.no_grad():
        assert torch.allclose(program(X), model(X), atol=1e-6)
    assert program.record.calls == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_records_or_transforms_runs_the_modules() -> None:
    """A traced program is no constant, maps and tangents pass, and autocast casts."""
    model = small().requires_grad_(requires_grad=False)  # which a trace takes as constants
    program = make_program(model, X)
    other = torch.randn(3, 8)

    def call(x: torch.Tensor) -> Any:
        return program(x)

    with torch.no_grad():
        traced: Any = torch.jit.trace(call, (X,), check_trace=False)
        assert torch.allclose(traced(other), model(other), atol=1e-6)
        assert torch.allclose(torch.func.vmap(call)(other), model(other), atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert program(X).dtype is torch.bfloat16


def test_a_transposed_parameter_is_an_error() -> None:
    """Of the same address and size, it is another matrix."""
    model = small()
    program = make_program(model, X)
    first: Any = model[0]
    first.weight.data = first.weight.data.t()
    with torch.no_grad(), pytest.raises(q4.LifecycleError, match="resized, moved or freed"):
        program(X)


@pytest.mark.parametrize("note", ["linear", {}, {"type": "no such type"}, {"type": []}])
def test_an_attribute_that_names_no_layer_type_counts_for_nothing(note: Any) -> None:
    """A module with a note of somebody else's in ``q4_layer`` emits what its class does."""
    layer = nn.Linear(8, 5)
    object.__setattr__(layer, "q4_layer", note)
    check(layer, X)
