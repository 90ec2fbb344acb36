"""The hook specifications: everything that a plugin can bring (pluggy, project name ``q4core``).

A plugin is a module (or object) named by an entry point in group ``q4core.plugins``. It implements any of these hooks
with ``@q4core.hookimpl``. Each hook returns a list; each call has its own try, so that one plugin that raises
never loses the others' answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from q4core.backend import Backend
    from q4core.checkpoint import CheckpointReader, CheckpointWriter
    from q4core.formats import Format
    from q4core.memory import MemoryPlacer, MemoryProvider
    from q4core.schema import Dialect

PROJECT = "q4core"
ENTRY_POINT_GROUP = "q4core.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """All hooks on one screen."""

    @hookspec
    def q4_formats(self) -> list[Format]:  # type: ignore[empty-body]  # a specification
        """Return further formats."""

    @hookspec
    def q4_dialects(self) -> list[Dialect]:  # type: ignore[empty-body]  # a specification
        """Return dialects of checkpoint files."""

    @hookspec
    def q4_backends(self) -> list[Backend]:  # type: ignore[empty-body]  # a specification
        """Return backends; cheap to construct, nothing is loaded or built here."""

    @hookspec
    def q4_memory_providers(self) -> list[MemoryProvider]:  # type: ignore[empty-body]  # a specification
        """Return providers of unified memory."""

    @hookspec
    def q4_placers(self) -> list[type[MemoryPlacer]]:  # type: ignore[empty-body]  # a specification
        """Return the class that places tensors in the memory of providers, with a ``name``; q4-um-managed brings it."""

    @hookspec
    def q4_checkpoint_readers(self) -> list[CheckpointReader]:  # type: ignore[empty-body]  # a specification
        """Return readers of checkpoint files."""

    @hookspec
    def q4_checkpoint_writers(self) -> list[CheckpointWriter]:  # type: ignore[empty-body]  # a specification
        """Return writers of checkpoint files."""

    @hookspec
    def q4_quantizers(self) -> list[Any]:  # type: ignore[empty-body]  # a specification
        """Return quantisers, each a ``q4core.Quantizer``."""

    @hookspec
    def q4_layers(self) -> list[Any]:  # type: ignore[empty-body]  # a specification
        """Return layer types of networks; q4-nn says what they are."""

    @hookspec
    def q4_architectures(self) -> list[Any]:  # type: ignore[empty-body]  # a specification
        """Return architectures of model files; q4-lm says what they are."""

    @hookspec
    def q4_event(self, event: str, fields: dict[str, Any]) -> None:
        """Observe a diagnostics event, such as ``"q4.select"``, with its fields."""
