"""``Hub``: the Ray actor that holds a system's tensors in the object store, and its events.

When a process requests a write turn that another one holds, the hub checks that the holder still lives: a lost process
holds nothing.
"""

from __future__ import annotations

import asyncio
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


class _State:
    """One tensor: its newest version, and the turn."""

    def __init__(self, content: Any, version: int) -> None:
        self.content, self.version = ray.put(content), version
        self.holder: _Holder | None = None
        self.moved = asyncio.Condition()


class Hub:
    """One of Ray's actors for each system: the newest version of each tensor, whose turn it is, and all events."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._stopped: set[str] = set()

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
