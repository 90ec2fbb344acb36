"""Backends and requests drawn at random for the tests of selection, and what the model needs to know of them."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import attrs
import torch
from hypothesis import strategies as st

import q4core as q4
from q4core.memory import Availability
from q4core.selection.probe_results import ProbeResults
from tests.support.fakes import FakeBackend, plugin
from tests.support.selection_model import Fact, Offer, State, Told, Wish

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ATTRIBUTES",
    "CASTS",
    "CODE",
    "MEMORIES",
    "REGISTRATION",
    "Cast",
    "History",
    "Memory",
    "Provider",
    "fact_of",
    "mixes",
    "players",
    "plugins_of",
]

NAMES = ("ant", "bee", "cat", "dog")
NOBODY = ("antt", "zebra")
CODE = q4.ReasonCode
EXACT = {q4.Precision.W4A32, q4.Precision.W4A16}
ON_ASKING = ("refuses", "declines", "raises", "leaves", "junk")
MIXED = [kind for kind in q4.PathKind if kind is not q4.PathKind.QUANTIZE]
KINDS: list[Sequence[q4.PathKind]] = [
    MIXED,
    [q4.PathKind.REFERENCE],
    [q4.PathKind.KERNEL],
    MIXED,
    [q4.PathKind.REFERENCE],
]
STATES = st.sampled_from([State.PROVEN] * 3 + [State.UNKNOWN, State.FAILED])
REFUSED = {"old api", "no manifest", "twice", "fails"}
REGISTRATION = "refused at registration"
DISABLED, PREFER, REQUIRE = q4.UnifiedMemoryPolicy
ATTRIBUTES = {"concurrentManagedAccess": 0}


@attrs.frozen(kw_only=True)
class Cast:
    """A backend as it was drawn.

    Args:
        name: Its name.
        conduct: What it, or its plugin, does.
        offers: Its paths.
        trains: Whether it declares gradients.
        is_on_cpu: Whether it declares the CPU.
        declares_all: Whether it declares every precision, or the exact ones alone.
        wrong: Names of paths that compute wrong numbers.
    """

    name: str
    conduct: str = "offers"
    offers: tuple[Offer, ...] = ()
    trains: bool = True
    is_on_cpu: bool = True
    declares_all: bool = True
    wrong: frozenset[str] = frozenset()

    @property
    def paths(self) -> tuple[q4.KernelPath, ...]:
        """Its paths."""
        return tuple(offer.path for offer in self.offers)


class Actor(FakeBackend):
    """A backend that does as it was cast."""

    def __init__(self, cast: Cast) -> None:
        features = frozenset(q4.Feature) if cast.trains else frozenset(q4.Feature) - {q4.Feature.GRADIENTS}
        super().__init__(
            cast.name,
            paths=cast.paths,
            api_version=(3, 0) if cast.conduct == "old api" else q4.API_VERSION,
            devices={"cpu" if cast.is_on_cpu else "cuda"},
            features=features,
            precisions=frozenset(q4.Precision) if cast.declares_all else EXACT,
        )
        self.cast = cast
        if cast.conduct == "no manifest":
            self.capabilities = None  # type: ignore[assignment]

    def check(self, request: q4.Request) -> Any:
        """Answer as cast."""
        self.requests.append(request)
        conduct, name = self.cast.conduct, self.name
        if conduct == "raises":
            raise RuntimeError(f"{name} has no idea")
        if conduct == "leaves":
            raise SystemExit(f"{name} has had enough")
        if conduct == "refuses":
            return q4.Support.no(
                [q4.Reason(CODE.NOT_BUILT, f"{name} was not built"), q4.Reason(CODE.SHAPE, f"{name} dislikes odd N")],
                native_state=f"{name}: missing",
            )
        if conduct == "declines":
            return q4.Support.no([q4.Reason(CODE.POLICY, f"{name} may not")], native_state=f"{name}: locked")
        if conduct == "junk":
            return [*self.paths]
        paths = [*self.paths, self.paths[0]] if conduct == "twins" else self.paths
        return q4.Support.yes(paths, native_state=f"{name}: loaded")

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Prepare, or raise as cast."""
        if self.cast.conduct == "cannot prepare":
            raise MemoryError(f"{self.name} lacks room")
        return super().prepare(weight, request, context)

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        """Compute, wrongly on the paths that were cast so."""
        super().linear(prepared, x, out, bias=bias, path=path)
        if path in self.cast.wrong:
            out[0, 3] += 1


def plugins_of(cast: Cast) -> list[tuple[str, object]]:
    """Return the plugins that bring a backend, by name."""
    if cast.conduct == "fails":
        broken = types.ModuleType("broken")
        broken.q4_backends = q4.hookimpl(lambda nobody: [])  # type: ignore[attr-defined]
        return [(cast.name, broken)]
    owners = [f"{cast.name}-plugin"] + ([f"{cast.name}-copy"] if cast.conduct == "twice" else [])
    return [(owner, plugin(Actor(cast))) for owner in owners]


def _refusals(cast: Cast, wish: Wish) -> tuple[str, list[Told]]:
    """Return the native state, and every reason why the backend offers nothing."""
    name, plain = cast.name, CODE.PLUGIN_ERROR
    at_registration = {
        "old api": [Told(CODE.API_VERSION, ("(3, 0)",))],
        "no manifest": [Told(plain, ("capabilities",))],
        "twice": [Told(plain, ("duplicate", f"{name}-plugin", f"{name}-copy"))] * 2,
        "fails": [Told(plain, ("nobody",))],
    }
    if cast.conduct in at_registration:
        return REGISTRATION, at_registration[cast.conduct]
    denied = [Told(CODE.DEVICE, ("'cpu'",))] if not cast.is_on_cpu else []
    if wish.gradients and not cast.trains:
        denied.append(Told(CODE.FEATURE, ("'gradients'",)))
    if denied:
        return "not asked", denied
    on_asking = {
        "raises": ("failed", [Told(plain, ("RuntimeError", f"{name} has no idea"))]),
        "leaves": ("failed", [Told(plain, ("SystemExit", f"{name} has had enough"))]),
        "junk": ("failed", [Told(plain, ("Support", "list"))]),
        "refuses": (f"{name}: missing", [Told(CODE.NOT_BUILT, (f"{name} was not",)), Told(CODE.SHAPE, ("odd N",))]),
    }
    on_asking["declines"] = (f"{name}: locked", [Told(CODE.POLICY, (f"{name} may not",))])
    if cast.conduct in on_asking:
        return on_asking[cast.conduct]
    state = f"{name}: loaded"
    if cast.conduct == "twins":  # one name is reported before what is not declared
        return state, [Told(plain, ("one name",))]
    undeclared = {path.precision for path in cast.paths} - EXACT
    if undeclared and not cast.declares_all:
        return state, [Told(plain, ("did not declare", *(precision.value for precision in undeclared)))]
    return state, []


def fact_of(cast: Cast, wish: Wish, found: frozenset[tuple[str, str]] = frozenset()) -> Fact:
    """Return what the model needs to know; ``found`` are the paths that probes have shown to be wrong by now."""
    state, refusals = _refusals(cast, wish)
    offers = tuple(
        attrs.evolve(offer, state=State.FAILED) if (cast.name, offer.path.name) in found else offer
        for offer in cast.offers
    )
    if refusals:
        return Fact(cast.name, state, (), tuple(refusals))
    return Fact(cast.name, state, offers, ())


class History(ProbeResults):
    """What was drawn of each path."""

    def __init__(self, casts: Sequence[Cast]) -> None:
        super().__init__()
        self._states = {(cast.name, offer.path.name): offer.state for cast in casts for offer in cast.offers}

    def disqualified(self, backend: str, path: q4.KernelPath, request: q4.Request) -> q4.Reason | None:
        """Return a reason that names the path."""
        if self._states[backend, path.name] is State.FAILED:
            return q4.Reason(CODE.PROBE_FAILED, f"path {path.name} of {backend} computed wrong numbers")
        return None

    def proven(self, backend: str, segment: q4.Segment, request: q4.Request) -> bool:
        """Return what was drawn."""
        return self._states[backend, segment.path.name] is State.PROVEN


@st.composite
def paths(draw: st.DrawFn, name: str, kinds: Sequence[q4.PathKind]) -> q4.KernelPath:
    """Draw a path; ranges of M leave gaps, overlap, and may end."""
    kind = draw(st.sampled_from(kinds))
    low = draw(st.sampled_from([1] * 8 + [2, 4, 6]))
    high = draw(st.sampled_from([None] * 8 + [*range(low, 10)]))
    every = [q4.Precision.W4A32] * 4 + list(q4.Precision)
    is_reference = kind is q4.PathKind.REFERENCE  # what the others are compared with is exact
    precision = q4.Precision.W4A32 if is_reference else draw(st.sampled_from(every))
    return q4.KernelPath(name, (low, high), kind, precision, draw(st.sampled_from(list(q4.Tier))))


@st.composite
def casts(draw: st.DrawFn, states: st.SearchStrategy[State], conducts: Sequence[str]) -> list[Cast]:
    """Draw up to four backends; most of them serve something."""
    drawn = []
    for name in draw(st.permutations(NAMES))[: draw(st.sampled_from([3, 4, 2, 1, 0]))]:
        kinds = draw(st.sampled_from(KINDS))
        offers = tuple(Offer(draw(paths(f"p{index}", kinds)), draw(states)) for index in range(draw(st.integers(1, 4))))
        drawn.append(
            Cast(
                name=name,
                conduct=draw(st.sampled_from([*["offers"] * (3 * len(conducts)), *conducts])),
                offers=offers,
                trains=draw(st.sampled_from([True] * 5 + [False])),
                is_on_cpu=draw(st.sampled_from([True] * 11 + [False])),
                declares_all=draw(st.sampled_from([True] * 11 + [False])),
            )
        )
    return drawn


@st.composite
def mixes(draw: st.DrawFn, drawn: st.SearchStrategy[list[Cast]]) -> tuple[list[Cast], Wish]:
    """Draw backends, and what is asked of them."""
    present = draw(drawn)
    named = st.sampled_from([*(cast.name for cast in present), *(cast.name for cast in present), *NAMES, *NOBODY])
    override = draw(named) if draw(st.booleans()) else None
    low = draw(st.sampled_from([1, 1, 2, 5]))
    every = [q4.ActivationPrecision.AUTO] * 5 + list(q4.ActivationPrecision)
    return present, Wish(
        compute_path=draw(st.sampled_from([*q4.ComputePath, q4.ComputePath.KERNEL_OR_FALLBACK])),
        precision=draw(st.sampled_from(every)),
        gradients=draw(st.sampled_from([False, False, True])),
        override=override,
        low=low,
        high=draw(st.sampled_from([None, None, None, *range(low, 10)])),
    )


@st.composite
def players(draw: st.DrawFn) -> list[Cast]:
    """Draw backends of which some paths compute wrong numbers, and some can't prepare."""
    drawn = draw(casts(st.just(State.UNKNOWN), [*ON_ASKING, "old api", "cannot prepare"]))
    wrong = st.sets(st.sampled_from(["p0", "p1", "p2", "p3"]), max_size=2)
    return [attrs.evolve(cast, wrong=frozenset(draw(wrong))) for cast in drawn]


CASTS = casts(STATES, [*ON_ASKING, "twins", *sorted(REFUSED)])


class Provider:
    """Hands out memory that it calls managed, or does not, as configured."""

    name = "managed"

    def __init__(self, conduct: str) -> None:
        self.conduct = conduct
        self._addresses: set[int] = set()

    def is_available(self, device: torch.device) -> Availability:
        """Answer as configured."""
        if self.conduct == "raises":
            raise OSError("the driver is gone")
        return Availability(self.conduct == "can", "as told", ATTRIBUTES)

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Look among what was handed out."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Copy."""
        return self.empty(tuple(tensor.shape), tensor.dtype, device).copy_(tensor)

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Move nothing."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hand out memory."""
        tensor = torch.empty(shape, dtype=dtype)
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Take memory back."""
        self._addresses.discard(tensor.untyped_storage().data_ptr())


@attrs.frozen(kw_only=True)
class Memory:
    """What is asked of unified memory, and what there is of it."""

    policy: q4.UnifiedMemoryPolicy
    provider: str
    is_turned_off: bool

    @property
    def can(self) -> bool:
        """Whether anything can be promoted."""
        return self.provider == "can" and not self.is_turned_off

    @property
    def fact(self) -> str:
        """What a record or an error must say where nothing can."""
        if self.is_turned_off:
            return "Q4_DISABLE_UM"
        return {"none": "no provider", "cannot": "as told", "raises": "the driver is gone"}.get(self.provider, "")


MEMORIES = st.builds(
    Memory,
    policy=st.sampled_from([DISABLED, PREFER, PREFER, REQUIRE]),
    provider=st.sampled_from(["none", "can", "can", "cannot", "raises"]),
    is_turned_off=st.sampled_from([False, False, True]),
)
