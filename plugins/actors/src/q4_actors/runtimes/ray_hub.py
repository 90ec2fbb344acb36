"""``Hub``: the Ray actor that holds a system's tensors in the object store, and its events.

When a process requests a write turn that another one holds, the hub checks that the holder still lives: a lost process
holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from typing import Any

import ray

__all__ = ["BORN", "Hub", "key_of", "words_of"]

BORN = secrets.token_hex(8)
"""Which incarnation of its actor this process is."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOOK_S = 0.2
"""Seconds between two checks that the holder of a turn lives, while others wait for it."""
_Holder = tuple[Any, str, str]
"""Ray's handle of a writer, None for the process that spawns; which incarnation; and which of its blocks."""

_Piece = tuple[int, int, list[Any]]
_Need = tuple[int, int, bool]
"""The least row, the last one that is there already, and whether rows are wanted, or their number alone."""


class _State:
    """One tensor: its newest version, and the turn."""

    def __init__(self, content: Any, version: int) -> None:
        self.content, self.version = ray.put(content), version
        self.holder: _Holder | None = None
        self.moved = asyncio.Condition()


class _Rings:
    """Stamps of rings, and references of the rows that were published, by name: (rows before, last row, its box)."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots, self.stamps = slots, dict.fromkeys(slots, 0)
        self.pieces: dict[str, list[_Piece]] = {name: [] for name in slots}
        self.moved = asyncio.Condition()

    def publish(self, name: str, since: int, stamp: int, box: list[Any] | None) -> None:
        """Store a reference in the place of those of the same rows: their owner has ended."""
        if box is None:
            self.stamps[name] = stamp
            return
        others = [piece for piece in self.pieces[name] if piece[1] <= since or piece[0] >= stamp]
        self.stamps[name] = max(self.stamps[name], stamp)
        oldest = self.stamps[name] - self.slots[name]
        self.pieces[name] = sorted([*(piece for piece in others if piece[1] > oldest), (since, stamp, box)])

    def rewind(self, stamp: int) -> None:
        """Drop all rows behind one."""
        for name, pieces in self.pieces.items():
            self.stamps[name] = min(self.stamps[name], stamp)
            self.pieces[name] = [piece for piece in pieces if piece[1] <= stamp]

    def after(self, name: str, have: int) -> list[_Piece]:
        """Return pieces without a gap for who has rows up to ``have``, or needs none of these."""
        found: list[_Piece] = []
        for piece in self.pieces[name]:
            if piece[0] <= have < piece[1]:
                found.append(piece)
                have = piece[1]
        return found

    def look(self, name: str, need: _Need) -> tuple[int, list[_Piece]]:
        """Return how far a ring is for who needs it so, and the pieces that are missing there."""
        _, have, wants_rows = need
        if not wants_rows:
            return self.stamps[name], []
        pieces = self.after(name, have)
        return (pieces[-1][1] if pieces else have), pieces


class Hub:
    """One of Ray's actors for each system: the newest version of each tensor, whose turn it is, and all events."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._stopped: set[str] = set()
        self._rings: dict[str, _Rings] = {}

    async def report(self, event: Any) -> None:
        """Store an event until it is fetched."""
        await self._events.put(event)

    async def events(self) -> list[Any]:
        """Return the events that there are, as soon as there is one."""
        found = [await self._events.get()]
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    async def watch(self, name: str, handle: Any) -> None:
        """Report an actor that Ray has given up, unless it was stopped."""
        try:
            await handle.stay.remote()
        except ray.exceptions.RayError as error:
            key = key_of(handle)
            if key not in self._stopped:
                await self.report(("lost", logging.ERROR, {"actor": name, "key": key, "error": words_of(error)}))

    async def forget(self, actor: str) -> None:
        """Record that an actor was stopped."""
        self._stopped.add(actor)

    async def add(self, name: str, content: Any, version: int) -> None:
        """Store a tensor."""
        self._states[name] = _State(content, version)

    async def newest(self, name: str) -> tuple[list[Any], int]:
        """Return the newest content, boxed so that it is not fetched, and its version."""
        state = self._states[name]
        return [state.content], state.version

    async def version(self, name: str) -> int:
        """Return the newest version."""
        return self._states[name].version

    async def wait(self, name: str, version: int, seconds: float | None) -> bool:
        """Wait for a version."""
        state = self._states[name]
        async with state.moved:
            try:
                await asyncio.wait_for(state.moved.wait_for(lambda: state.version >= version), seconds)
            except asyncio.TimeoutError:
                return False
        return True

    async def begin(self, name: str, holder: _Holder, seconds: float | None) -> bool:
        """Take the turn; False if the time ran out."""
        state, deadline = self._states[name], None if seconds is None else time.monotonic() + seconds
        while state.holder is not None and state.holder[1:] != holder[1:]:
            known = state.holder
            if not await _lives(known):
                if state.holder is known:
                    state.holder = None
                continue
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            async with state.moved:
                try:
                    await asyncio.wait_for(state.moved.wait(), min(left, _LOOK_S))
                except asyncio.TimeoutError:
                    continue
        state.holder = holder
        return True

    async def end(self, name: str, holder: _Holder, content: Any) -> int:
        """Give the turn back, with a new content or None; return the version, −1 if the turn was lost."""
        state = self._states[name]
        if state.holder is None or state.holder[1:] != holder[1:]:
            return -1
        if content is not None:
            state.content, state.version = ray.put(content), state.version + 1
        state.holder = None
        async with state.moved:
            state.moved.notify_all()
        return state.version

    async def add_rings(self, key: str, slots: dict[str, int]) -> None:
        """List rings, by name with their numbers of slots."""
        self._rings[key] = _Rings(slots)

    async def publish_rows(self, key: str, name: str, since: int, stamp: int, box: list[Any] | None) -> None:
        """Store where rows are, boxed so that they are not fetched; or a stamp alone."""
        rings = self._rings[key]
        rings.publish(name, since, stamp, box)
        async with rings.moved:
            rings.moved.notify_all()

    async def rewind_rows(self, key: str, stamp: int) -> None:
        """Set back all rings that have more rows."""
        self._rings[key].rewind(stamp)

    async def await_rows(
        self, key: str, needs: dict[str, _Need], stop: str | None, seconds: float
    ) -> tuple[dict[str, tuple[int, list[_Piece]]], int]:
        """Wait until rings are so far, or one has a stamp; return what there is of each, and that stamp."""
        rings = self._rings[key]

        def found() -> dict[str, tuple[int, list[_Piece]]]:
            return {name: rings.look(name, need) for name, need in needs.items()}

        def is_over() -> bool:
            there = found()
            return bool(stop and rings.stamps[stop]) or all(there[name][0] >= need[0] for name, need in needs.items())

        async with rings.moved:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(rings.moved.wait_for(is_over), seconds)
        return found(), rings.stamps[stop] if stop else 0


def key_of(handle: Any) -> str:
    """Return a key that no other actor has: names may be reused."""
    key: str = handle._actor_id.hex()  # noqa: SLF001  # Ray has no public attribute for it
    return key


def words_of(error: BaseException) -> str:
    """Return what Ray says of an actor that it has given up, or whose node is lost; a cause comes last."""
    text = " ".join(_COLOUR.sub("", str(error)).split())
    return f"Ray says: {type(error).__name__}: {text if len(text) < 600 else f'{text[:300]} … {text[-300:]}'}"  # noqa: PLR2004  # as above


async def _lives(holder: _Holder) -> bool:
    """Return whether a writer is the incarnation that took the turn."""
    handle, born, _ = holder
    if handle is None:
        return True
    try:
        return bool((await handle.status.remote())[0] == born)
    except ray.exceptions.RayError:
        return False
