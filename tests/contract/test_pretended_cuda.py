"""The core and the kit keep everything on one device: every case, on a CUDA device that is pretended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch

import q4core as q4
from q4_conformance import Case, Outcome, backend_cases, device_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_conformance.subjects.reference import reference_backend
from tests.support.pretended import DEVICE, pretended_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMATS = ("nf4", "nvfp4", "int4")
NEEDS_MORE = {
    "gradient": "autograd takes no pretended device",
    "state": "torch.save writes no pretended tensor",
    "graph": "it has no graphs",
    "quiet": "it has no streams, and no memory of its own",
    "stream": "as quiet",
    "kind": "as quiet",
    "dispose": "as quiet",
    "calls": "as quiet",
    "train_through": "as gradient",
    "opcheck": "as gradient",
    "compile": "as gradient",
    "elsewhere": "as state",
    "copies": "a module's .to() sets the data of its buffers, which a pretended tensor does not have",
    "inference": "in inference mode torch makes the memory of a conversion itself, where no pretence is asked",
    "modes": "torch knows no autocast for it",
    "forked": "a process that is forked can't use a CUDA device",
    "last_page": "its memory is no page of the CPU's",
}
"""Checks that need a real device."""
EVERY = (*linear_cases(FORMATS), *backend_cases(FORMATS), *device_cases(FORMATS))
CASES = [
    case
    for case in EVERY
    if case.check not in NEEDS_MORE
    and case.precision is q4.ActivationPrecision.EXACT
    and case.dtype in {torch.float32, torch.bfloat16}
    and (case.check != "values" or case.dtype is torch.bfloat16)
]


class _Twin:
    """The reference's arithmetic under another name, offered as a kernel, for CUDA devices alone."""

    name = "twin"
    api_version = (2, 0)

    def __init__(self, interpreted: bool = False) -> None:
        self._interpreted = interpreted
        self._reference = reference_backend()
        self.capabilities = attrs.evolve(self._reference.capabilities, devices={"cuda"})

    def check(self, request: q4.Request) -> q4.Support:
        paths = [
            attrs.evolve(
                path, name="twin", kind=q4.PathKind.KERNEL, tier=q4.Tier.GENERIC, interpreted=self._interpreted
            )
            for path in self._reference.check(request).paths
        ]
        return q4.Support.yes(paths, native_state="pretended")

    def __getattr__(self, name: str) -> object:
        return getattr(self._reference, name)


@pytest.fixture(scope="module")
def subject() -> Iterator[BackendSubject]:
    """The twin, on the pretended device."""
    with pretended_cuda():
        yield BackendSubject(_Twin(), device=DEVICE)  # type: ignore[arg-type]  # a backend by __getattr__


DECLARED = split(CASES, BackendSubject(_Twin(), device=DEVICE))[0]  # type: ignore[arg-type]  # as below


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    """Leave to ``soak`` what another format has shown in each run, and what makes thousands of calls."""
    is_often = case.weight_recipe.format.name == "nf4" and case.part not in {"varied", "long", "wide"}
    return [] if is_often or case.part == "values" else [pytest.mark.soak]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=_marks(case)) for case in DECLARED])
def test_case(case: Case, subject: BackendSubject) -> None:
    """The case ends as it does on the CPU, with every tensor of the layer on the device."""
    result = run_case(case, subject)
    assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_an_interpreted_path_is_no_proof_of_a_device(is_interpreted: bool) -> None:
    """The kit fails a path that says of itself, on an accelerator, that it is interpreted; and no other one."""
    case = next(case for case in CASES if case.check == "values")
    with pretended_cuda():
        result = run_case(case, BackendSubject(_Twin(is_interpreted), device=DEVICE))  # type: ignore[arg-type]  # as above
    assert result.outcome is (Outcome.FAIL if is_interpreted else Outcome.PASS), result
    assert ("interpreted: twin" in result.message) is is_interpreted


def test_the_pretended_device_mixes_with_nothing() -> None:
    """It refuses operations across devices as CUDA does, so that the cases above can fail."""
    with pretended_cuda():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert there.is_cuda
        assert (there + 1).device == torch.device(DEVICE)
        wrong: Callable[..., object]
        for wrong in (torch.add, torch.equal, torch.dot):
            with pytest.raises(RuntimeError, match="same device"):
                wrong(there, here)
        assert torch.equal((there + there.cpu().to(DEVICE)).cpu(), here * 2)
