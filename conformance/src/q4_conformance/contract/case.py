"""A case: plain data, with the name of the check that runs it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from q4_conformance.oracle.exact import judge_by
from q4_conformance.outcome import FailureError
from q4core import ActivationPrecision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.oracle.weights import WeightRecipe
    from q4core import PackedWeight

_Error = TypeVar("_Error", bound=Exception)
CHECKS: dict[str, Callable[[Case, Any], str]] = {}
"""Name → function of (case, subject) that returns what was measured, or raises."""


@attrs.frozen
class Case:
    """One case.

    Args:
        contract: Which contract case it belongs to, such as ``"TC-09"``.
        part: Which part of it.
        text: What must hold.
        check: Name of the function in ``CHECKS`` that runs it.
        profile: ``"linear"`` concerns functions and backends, ``"backend"`` backends, ``"memory"`` providers of
            managed memory, ``"dialect"`` dialects, ``"file"`` readers and writers of files, ``"layer"`` layer types,
            ``"program"`` programs of backends, ``"core"`` the core alone.
        recipe: The weight.
        dtype: dtype of x.
        precision: To what precision the activations may be rounded.
        rows: Values of M.
        seeds: Seeds of the draws; further ones follow where an element was not seen.
        shift: Activations are two to this larger.
        format: Name of the format, where a case concerns one and has no weight of its own.
        is_slow: Whether it takes more than a few seconds.
    """

    contract: str
    part: str
    text: str
    check: str
    profile: str = "linear"
    recipe: WeightRecipe | None = None
    dtype: torch.dtype = torch.float32
    precision: ActivationPrecision = ActivationPrecision.EXACT
    rows: tuple[int, ...] = (1, 5)
    seeds: tuple[int, ...] = (11, 12, 13)
    shift: int = 0
    format: str = ""
    is_slow: bool = False

    @property
    def id(self) -> str:
        """Stable id: contract case, part, and what the case runs on."""
        words = [self.contract, self.part, *filter(None, [self.format])]
        if self.recipe is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            words += [self.recipe.label, dtype, self.precision.value]
        return "/".join(words)

    @property
    def weight_recipe(self) -> WeightRecipe:
        """The recipe, which the case must have."""
        if self.recipe is None:
            raise LookupError(f"case {self.id} has no weight")
        return self.recipe

    def weight(self) -> PackedWeight:
        """Return the weight, new each time; the oracle judges by a twin that no subject ever holds."""
        weight = self.weight_recipe.build()
        judge_by(weight, _twin(self.weight_recipe))
        return weight


@functools.lru_cache(maxsize=4)  # the cases of one weight follow each other
def _twin(recipe: WeightRecipe) -> PackedWeight:
    return recipe.build()


def part_order(part: str) -> tuple[bool, str]:
    """Return the sort key of a part: the contract's own cases before the extended ones."""
    return (not part.startswith("TC"), part)


def check(name: str) -> Callable[[Callable[[Case, Any], str]], Callable[[Case, Any], str]]:
    """Enter a function into ``CHECKS``."""

    def enter(function: Callable[[Case, Any], str]) -> Callable[[Case, Any], str]:
        if name in CHECKS:
            raise ValueError(f"a second check of the name {name!r}")
        CHECKS[name] = function
        return function

    return enter


def raised(kind: type[_Error] | tuple[type[_Error], ...], call: Callable[[], object], otherwise: str) -> _Error:
    """Return the error of a kind that a call raises; where it raises none, fail for the reason ``otherwise``."""
    try:
        call()
    except kind as error:
        return error
    raise FailureError(otherwise)


@contextlib.contextmanager
def within(where: str) -> Iterator[None]:
    """Add to a failure inside the ``with`` block where it was."""
    try:
        yield
    except FailureError as error:
        raise FailureError(f"{where}: {error}") from error


def expect(condition: object, message: str) -> None:
    """Raise ``FailureError`` where what must hold does not."""
    if not condition:
        raise FailureError(message)
