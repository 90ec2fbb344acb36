"""Blocks of a ``MutableTensor`` in unified memory, by its CPU side or by its CUDA side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from q4core.errors import ConfigError, LifecycleError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from q4core.mutable.blocks import ReadView, WriteBlock

__all__ = ["SideRead", "SideWrite", "Sides", "to_side"]


class Sides(Protocol):
    """A CPU tensor and a CUDA tensor over the same bytes, such as a memory provider's ``dual_view`` gives."""

    def on_cpu(self) -> AbstractContextManager[torch.Tensor]:
        """Give the CPU tensor once the device has done what was queued by ``on_cuda`` blocks."""
        ...

    def on_cuda(self) -> AbstractContextManager[torch.Tensor]:
        """Give the CUDA tensor; what the block queues is awaited by ``settle``."""
        ...

    def settle(self) -> None:
        """Wait for what ``on_cuda`` blocks have queued."""
        ...


def to_side(label: str, sides: Sides | None, device: str) -> str:
    """Return the side that is meant.

    Raises:
        ConfigError: There is only one, or no such.
    """
    if sides is None:
        raise ConfigError(
            label, name="device", rule="None without sides=", value=device, hint="Give it the sides of its memory."
        )
    if device not in {"cpu", "cuda"}:
        raise ConfigError(label, name="device", rule="'cpu', 'cuda' or None", value=device)
    return device


class _SideBlock:
    def __init__(self, sides: Sides, device: str) -> None:
        self._sides, self._device = sides, device
        self._side: AbstractContextManager[torch.Tensor] | None = None

    def _enter_side(self) -> torch.Tensor:
        self._side = self._sides.on_cpu() if self._device == "cpu" else self._sides.on_cuda()
        return self._side.__enter__()

    def _leave_side(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.__exit__(kind, error, trace)
            self._sides.settle()  # whoever comes next may be of the other side


class SideRead(_SideBlock):
    """What ``read(device=…)`` gives: ``tensor`` and ``version``, as ``ReadView`` does, of one side."""

    def __init__(self, view: ReadView, sides: Sides, device: str) -> None:
        super().__init__(sides, device)
        self._view = view
        self._tensor: torch.Tensor | None = None

    @property
    def version(self) -> int:
        """The number of the version."""
        return self._view.version

    @property
    def tensor(self) -> torch.Tensor:
        """The content. To be read.

        Raises:
            LifecycleError: The block has ended, or was never entered.
        """
        if self._tensor is None:
            raise LifecycleError("read view", name="view.tensor", rule="used inside its with block")
        return self._tensor

    def __enter__(self) -> Self:
        """Begin to read."""
        self._view.__enter__()
        try:
            self._tensor = self._enter_side()
        except BaseException as error:
            self._view.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the read."""
        self._tensor = None
        try:
            self._leave_side(kind, error, trace)
        finally:
            self._view.__exit__(kind, error, trace)


class SideWrite(_SideBlock):
    """What ``write(device=…)`` gives: the tensor to change, of one side."""

    def __init__(self, block: WriteBlock, sides: Sides, device: str) -> None:
        super().__init__(sides, device)
        self._block = block

    def __enter__(self) -> torch.Tensor:
        """Begin to write."""
        self._block.__enter__()
        try:
            return self._enter_side()
        except BaseException:
            self._block.withdraw()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the update as the next version; if the block failed, or its side can't be left, it is poisoned."""
        try:
            self._leave_side(kind, error, trace)
        except BaseException as fault:
            if self._block.is_admitted:
                self._block.__exit__(type(fault), fault, fault.__traceback__)
            raise
        self._block.__exit__(kind, error, trace)
