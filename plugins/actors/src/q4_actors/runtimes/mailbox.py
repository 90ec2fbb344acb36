"""Mailboxes between processes: pipes with names, in which each write is one message, and a page for each actor.

Linux writes up to a page into a pipe as a whole, and reads it as a whole where the writer says ``O_DIRECT``; so any
number of processes send to one mailbox without a lock that a killed process could hold. A pipe has room for as many
messages as it has pages. What is larger lies in a file of the same folder, whose name is sent. The receiver reads
straight into a page that it shares with its supervisor, and clears it when it has handled the message: so one that is
killed loses none. The folder is its user's alone, and in the system's memory.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import os
import pickle
import secrets
import select
import shutil
import stat
import struct
import time
from typing import TYPE_CHECKING, Any

import attrs

from q4_actors.runtimes.actor import MAX_RESTARTS
from q4_actors.runtimes.errors import ActorError, MessageError
from q4_actors.tensors.segment import FOLDER
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    import pathlib

__all__ = ["FRAME", "LOOK_S", "Frame", "Kind", "Page", "Post", "State", "dumps"]

PREFIX = "q4actors-"
FRAME = 4096
"""Bytes that Linux reads and writes as a whole."""
HEAD = struct.Struct("<BBHIQ16s")  # kind, whether the body is a file's name, its bytes, nothing, number, reply to
Kind = enum.IntEnum("Kind", ("TELL", "ASK", "STOP", "WELL", "WRONG", "EVENT"))
"""What a message is; ``WELL`` and ``WRONG`` are answers."""
State = enum.IntEnum("State", ("LIVE", "ENDING", "DEAD"), start=0)
"""Of an actor: whether it takes messages, only handles those that are there, or none."""
LOOK_S = 0.1
"""Seconds between two checks of a waiting process that the other one still lives."""


def dumps(what: str, value: Any) -> bytes:
    """Return a message as bytes.

    Raises:
        MessageError: It can't be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except PLUGIN_FAULTS as error:
        text = f"{what} can't be pickled: {type(value).__name__}: {type(error).__name__}: {error}"
        raise MessageError(text, hint="Send plain data, tensors, references and shared tensors.") from error


@attrs.frozen(eq=False)
class Frame:
    """One message as it is sent."""

    kind: int
    number: int
    reply: str
    body: bytes
    file: str | None

    @classmethod
    def read(cls, folder: pathlib.Path, data: Any) -> Frame:
        """Return what a page or a pipe holds."""
        kind, is_file, size, _, number, reply = HEAD.unpack_from(data)
        body = bytes(data[HEAD.size : HEAD.size + size])
        file = body.decode() if is_file else None
        if file is not None:
            body = (folder / file).read_bytes()
        return cls(kind, number, reply.rstrip(b"\0").decode(), body, file)


class Page:
    """An actor's page, shared by supervisor, actor and senders: the current message, its state, its restarts."""

    def __init__(self, path: pathlib.Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(file, 2 * FRAME)
        finally:
            os.close(file)
        view = memoryview(self._memory)
        self.current, self._state = view[:FRAME], view[FRAME : FRAME + 1]
        self.times: Any = view[FRAME + 8 : FRAME + 8 * (1 + MAX_RESTARTS)].cast("d")
        self._why = view[FRAME + 1024 : FRAME + 2048]

    @classmethod
    def create(cls, path: pathlib.Path) -> Page:
        """Make the page of a new actor.

        Raises:
            ActorError: There is no room for it.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, 2 * FRAME)  # so that no later store finds the memory used up
            finally:
                os.close(file)
            page = cls(path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ActorError(f"there is no room for another actor: {error}", hint=f"Make room in {FOLDER}.") from error
        for index in range(MAX_RESTARTS):
            page.times[index] = float("-inf")
        return page

    @property
    def state(self) -> int:
        """A ``State``."""
        return self._state[0]

    @property
    def why(self) -> str:
        """The reason why no messages are accepted any more."""
        return self._noted() or "it was stopped"

    def end(self, state: int, why: str = "") -> None:
        """Mark that no messages are accepted any more, with the reason."""
        if why:
            self.note(why)
        self._state[0] = state

    def note(self, why: str) -> None:
        """Record why the process ends, for its supervisor."""
        text = why.encode(errors="backslashreplace")[: len(self._why) - 1]
        self._why[: len(text) + 1] = text + b"\0"

    def take_note(self) -> str:
        """Return what was noted last, if anything, and forget it."""
        text = self._noted()
        self._why[0] = 0
        return text

    def _noted(self) -> str:
        return bytes(self._why).split(b"\0")[0].decode(errors="replace")


class Post:
    """The folder of a system's mailboxes, as one process sees it.

    Raises:
        ActorError: It can't be made or entered.
    """

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        self.is_maker = folder is None
        try:
            if folder is None:
                _remove_unused()
                folder = FOLDER / f"{PREFIX}{secrets.token_hex(8)}"
                folder.mkdir(mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # held by every living process
        except OSError as error:
            raise ActorError(f"the mailboxes of an actor system can't be opened: {error}") from error
        self.folder = folder
        self._open: dict[str, int] = {}

    def make_box(self, name: str, room: int) -> int:
        """Make a mailbox, and return its file for reading, which keeps it open.

        Raises:
            ActorError: The system gives no room for it.
        """
        path = self.folder / name
        file = -1
        try:
            os.mkfifo(path, 0o600)
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, room * FRAME)
            if fcntl.fcntl(file, fcntl.F_GETPIPE_SZ) < room * FRAME:
                raise OSError(errno.EPERM, "pipe too small")  # noqa: TRY301  # as the system's own
        except OSError as error:
            if file >= 0:
                os.close(file)
            path.unlink(missing_ok=True)
            hint = "Use a smaller mailbox=, or fewer actors (/proc/sys/fs/pipe-user-pages-soft)."
            raise ActorError(f"the system has no room for another mailbox: {error}", hint=hint) from error
        return file

    def send(self, box: str, kind: int, body: bytes, *, number: int = 0, reply: str = "") -> bool:
        """Put a message into a mailbox; return False if it is full.

        Raises:
            MessageError: There is no room for a large one.
            BrokenPipeError: The mailbox has no reader any more, or it was removed.
        """
        file = self._file(box)
        name = None
        if len(body) > FRAME - HEAD.size:
            name = f"m{secrets.token_hex(8)}"
            self._write(name, body)
            body = name.encode()
        head = HEAD.pack(kind, name is not None, len(body), 0, number, reply.encode())
        is_sent = False
        try:
            os.write(file, head + body)
            is_sent = True
        except BlockingIOError:
            return False
        except BrokenPipeError:
            os.close(self._open.pop(box))
            raise
        finally:
            if not is_sent and name is not None:
                (self.folder / name).unlink(missing_ok=True)
        return True

    def send_waiting(self, box: str, kind: int, body: bytes, **options: Any) -> None:
        """Put a message into a mailbox whose reader lives, as soon as there is room."""
        while not self.send(box, kind, body, **options):
            self.await_room(box, LOOK_S)

    def await_room(self, box: str, seconds: float) -> None:
        """Wait until a mailbox has room, or the time runs out."""
        watch = select.poll()
        watch.register(self._file(box), select.POLLOUT)
        watch.poll(seconds * 1000)

    def forget(self, frame: Frame) -> None:
        """Remove what a message left in the folder."""
        if frame.file is not None:
            (self.folder / frame.file).unlink(missing_ok=True)

    def close(self) -> None:
        """Close everything; the maker removes the folder."""
        for file in (*self._open.values(), self._lock):
            os.close(file)
        self._open = {}
        if self.is_maker:
            self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, box: str) -> int:
        file = self._open.get(box)
        if file is None:
            if box.startswith("r"):  # those of threads that have ended are gone
                for gone in [name for name in self._open if not (self.folder / name).exists()]:
                    os.close(self._open.pop(gone))
            try:
                file = os.open(self.folder / box, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # ENXIO: no reader; ENOENT: removed
                raise BrokenPipeError(errno.EPIPE, str(error)) from error
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)
            other = self._open.setdefault(box, file)
            if other != file:  # another thread was first
                os.close(file)
                file = other
        return file

    def _write(self, name: str, body: bytes) -> None:
        try:
            (self.folder / name).write_bytes(body)
        except OSError as error:
            (self.folder / name).unlink(missing_ok=True)
            text = f"a message of {len(body)} bytes can't be sent: {error}"
            raise MessageError(text, hint=f"Check the free space in {FOLDER}, or share a tensor.") from error


def _remove_unused() -> None:
    """Remove the folders of this user whose processes were all killed."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
                continue
            file = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - facts.st_mtime > 1.0:  # else its maker may be about to lock it
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)
