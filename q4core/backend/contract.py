"""The contract itself: ``Backend``, and what passes between it and the core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from q4core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from q4core.backend.capabilities import Capabilities
    from q4core.backend.request import Request
    from q4core.backend.support import Segment, Support
    from q4core.weight import PackedWeight

API_VERSION = (2, 0)
"""Version of this contract. A newer backend is refused."""
SERVED_VERSIONS = ((1, 0), API_VERSION)
"""Versions whose backends run as they are; each stands for its older minor ones as well. docs/api-2.0.md says why."""


def _tensors(items: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(items)


@attrs.frozen
class Prepared:
    """A weight in a backend's own layout.

    Args:
        tensors: A fixed tuple of tensors.
        meta: Hashable description of the layout only (no names, no handles, nothing that differs between layers of
            one shape), so that equal layers share one compiled graph. Its ``repr`` must be stable across processes.
    """

    tensors: tuple[torch.Tensor, ...] = attrs.field(converter=_tensors)
    meta: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@attrs.frozen
class PrepareContext:
    """Where ``prepare`` puts things.

    Args:
        device: Where ``empty`` allocates by default; to a backend it is ``request.device``.
        empty: ``empty(shape, dtype)`` allocates on the device; what comes from it may be managed memory and is written
            once, in place.
        paths: The paths that were selected, each with a range of M that it will serve, by rising M: ``linear`` is
            called with no other path and no other M, also not by the self-probe. Empty where nothing was selected
            (a backend's own tests, say); any path that ``check`` offers may then be called.
        gradient_paths: The same of ``input_gradient``; empty also where no gradients are asked for.
    """

    _device: torch.device = attrs.field(converter=torch.device)
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = attrs.field(
        default=attrs.Factory(
            lambda self: lambda shape, dtype: torch.empty(shape, dtype=dtype, device=self._device), takes_self=True
        )
    )
    paths: tuple[Segment, ...] = ()
    gradient_paths: tuple[Segment, ...] = ()

    def keep(
        self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a contiguous copy of a tensor in memory from ``empty``, written once; the tensor stays as it is.

        Args:
            tensor: Any strided tensor, on any device.
            shape: Shape of the copy, of as many values. Defaults to the tensor's own.
            dtype: dtype of the copy, to which the values are converted. Defaults to the tensor's own.

        Raises:
            ConfigError: ``shape`` holds another number of values.
        """
        wanted = tuple(tensor.shape) if shape is None else shape
        if min(wanted, default=0) < 0 or math.prod(wanted) != tensor.numel():
            raise ConfigError("context.keep", name="shape", rule=f"one of {tensor.numel()} values", value=wanted)
        place = self.empty(wanted, tensor.dtype if dtype is None else dtype)
        return place.copy_(tensor.reshape(wanted))


@runtime_checkable
class Backend(Protocol):
    """One class with few duties.

    Optional methods: ``quantize(dense, request, *, rounding=Rounding.NEAREST, seed=0) -> PackedWeight`` (declare op
    ``"quantize"``, and ``roundings`` beyond the nearest), which is given finite values alone, and
    ``export(prepared, rows=None) -> PackedWeight``, the inverse of ``prepare``, whole or for the rows of an int64
    index tensor on the prepared tensors' device. A backend without ``export`` keeps its source alive.

    ``input_gradient(prepared, grad, out, *, path) -> None`` (declare op ``"input_gradient"``) writes ``grad @ w``, with
    exact weights and sums in float32: grad [M, N] of the request's out_dtype, contiguous; out [M, K] of its dtype,
    contiguous. ``check`` is asked with that op for the paths, only where gradients are wanted. A backend without it, or
    whose gradient is refused or wrong, leaves the gradient to the core.

    ``bind_program(program, buffers, layers) -> Runner`` (declare op ``"program"``) binds a list of operations, which
    one call then runs; see ``q4_programs.RunsPrograms``. With the op ``"spiking"`` alone, those of spiking networks.

    ``spikes(prepared, x, out, *, bias) -> None`` and ``spike_limit(rows) -> float`` (declare op
    ``"spikes"``) multiply with rows of 0 and 1; see ``q4_snn.products.RunsSpikes``.

    ``describe(meta) -> dict`` gives ``Prepared.meta`` as what JSON holds, with a number that changes with the layout,
    and ``meta_from(facts) -> meta`` gives an equal one back in any process; a ``Q4Error`` for facts that this
    version did not write. With both, and an ``export`` that refuses tensors of other sizes than the layout's, what is
    prepared can be stored and reused by another process.

    What a backend has loaded or compiled it may keep after its last layer is gone, for the next one.
    """

    name: str
    api_version: tuple[int, int]
    capabilities: Capabilities

    def check(self, request: Request) -> Support:
        """Answer a request that the manifest allows.

        No side effects; may not raise. It may be slow once (to look at the driver, say), and is asked often.
        """
        ...

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Do everything slow (repack, compile, tune). Never called inside a trace or a capture.

        Raises:
            PrepareError: The backend finds only now that it can't serve weights of this kind.
        """
        ...

    def linear(
        self,
        prepared: Prepared,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        path: str,
    ) -> int | None:
        """Write ``x @ wᵀ + bias`` to ``out``.

        Args:
            prepared: What ``prepare`` gave.
            x: [M, K], contiguous rows (stride 1 along K, any row stride), M ≥ 1 in a range that the path serves.
            out: [M, N] of the request's out_dtype, contiguous; written completely, never read.
            bias: [N] of the out_dtype, or None.
            path: Name of one of the paths that were selected.

        Returns:
            None, or how many rows of x had outliers, numbers next to which rounding would lose the others: for reports.
        """
        ...
