"""``Segment``: memory that processes share, the header that describes it, and the locks on its parts.

A file in ``/dev/shm``: one page of header, the processes' rows, then the slots, each on pages of its own. It gets its
name only once it is complete, and every process that uses it holds a shared lock, so that a segment without users can
be recognised and removed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import re
import secrets
import stat
import weakref
from typing import TYPE_CHECKING, Any

import torch

from q4_actors.tensors.file_locks import FileLocks
from q4_actors.tensors.form import CAUSE, CURRENT, MAX_RANK, PAGE, START, Form
from q4core import ConfigError, InputError, LifecycleError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FIRST_ROW", "USED", "Segment"]

FOLDER = pathlib.Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory
NAME = re.compile(r"q4core-[0-9a-f]{16}")
USED, FIRST_ROW = 0, 1
"""Places to lock: by all who use the segment; and by whose row it is, row by row."""


def _remove_unused() -> None:
    """Remove the segments of this user that no living process has open: their makers were killed."""
    for path in FOLDER.iterdir():
        if NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                own = _OPEN.get(path.name)
                if (own is None or not own.close.alive) and path.lstat().st_uid == os.getuid():
                    locks = FileLocks(str(path), path.name)
                    try:
                        if locks.try_exclusive(USED):
                            path.unlink()
                    finally:
                        locks.close()


class Segment:
    """Shared memory, mapped. Made by ``create`` or ``attach``.

    Attributes:
        name: What other processes attach to.
        form: What it holds.
        locks: On ``USED``, and on ``FIRST_ROW`` + this process's row.
        words: The header, as 64-bit words.
        memory: All of it.
        slots: The contents, one tensor each, which count their changes apart from one another.
        is_maker: Whether this process made it (and so removes its name).
    """

    def __init__(self, name: str, form: Form, file: int, locks: FileLocks, *, is_maker: bool) -> None:
        self.name, self.form, self.locks, self.is_maker = name, form, locks, is_maker
        mapping = mmap.mmap(file, form.total)
        self.memory: Any = mapping
        self.words = memoryview(mapping)[:PAGE].cast("q")
        self._bytes = memoryview(mapping)[:PAGE]
        with torch.inference_mode(mode=False):
            self.slots = [_over(mapping, form, START + index * form.stride) for index in range(form.slots)]
        self._held: list[Any] = [locks]
        named = weakref.finalize(self, _remove_name, FOLDER / name, os.getpid()) if is_maker else None
        self.close = weakref.finalize(self, _close, self._held, named)
        # When the interpreter exits, a daemon thread may still write: the kernel releases its locks.
        self.close.atexit = False
        _OPEN[name] = self

    @classmethod
    def create(cls, label: str, form: Form, content: torch.Tensor, version: int = 0) -> Self:
        """Make a segment with a first content, and the number of its version.

        Raises:
            InputError: There is no room for it, or the tensor has too many dimensions.
            LifecycleError: The system refuses a file or a lock.
        """
        if len(form.shape) > MAX_RANK:
            raise InputError(label, name="rank", rule=f"{MAX_RANK} or less", value=len(form.shape))
        try:
            _remove_unused()
            free = os.statvfs(FOLDER)
            room = free.f_bavail * free.f_frsize
            if room < form.total:
                rule = f"at most the {room} bytes that are free in {FOLDER}"
                hint = "Use fewer slots, IN_PLACE, or give the machine more shared memory."
                raise InputError(label, name="size", rule=rule, value=form.total, hint=hint)
            name = f"q4core-{secrets.token_hex(8)}"
            locks: FileLocks | None = None
            file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, form.total)  # so that no later store finds the memory used up
                os.pwrite(file, form.pack(), 0)
                locks = FileLocks(f"/proc/self/fd/{file}", label)
                locks.try_shared(USED)
                made = cls(name, form, file, locks, is_maker=True)
                made.slots[0].copy_(content)
                made.words[CURRENT] = version << 8
                os.link(f"/proc/self/fd/{file}", FOLDER / name, src_dir_fd=file)  # else links are not followed
            except BaseException:
                if locks is not None:
                    locks.close()
                raise
            else:
                return made
            finally:
                os.close(file)
        except OSError as error:
            hint = f"Check {FOLDER}: its size, its permissions, and the limit on open files."
            raise LifecycleError(f"{label} gets no shared memory: {error}", hint=hint) from error

    @classmethod
    def attach(cls, label: str, name: str) -> Self:
        """Join a segment that another process made.

        Raises:
            ConfigError: ``name`` is none of a segment.
            LifecycleError: It is gone, its size or header is wrong, or it may not be opened.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            hint = "Give what SharedMutableTensor.segment says."
            raise ConfigError(label, name="segment", rule=f"a name like {NAME.pattern}", value=name, hint=hint)
        hint = "Its maker has closed it, dropped it or ended. Keep the maker's tensor while others may attach."
        gone = LifecycleError(f"{label}: segment {name} has vanished", hint=hint)
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise gone from None
        except OSError as error:
            raise LifecycleError(f"{label}: segment {name} can't be opened: {error}") from error
        locks: FileLocks | None = None
        try:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                text = f"{label}: segment {name} is no file ({stat.filemode(facts.st_mode)})"
                raise LifecycleError(text)  # noqa: TRY301  # what was opened must be closed
            form = Form.unpack(label, os.pread(file, PAGE, 0), facts.st_size)
            locks = FileLocks(f"/proc/self/fd/{file}", label)
            if not locks.try_shared(USED) or os.fstat(file).st_nlink == 0:
                raise gone  # noqa: TRY301  # as above
            return cls(name, form, file, locks, is_maker=False)
        except BaseException as error:
            if locks is not None:
                locks.close()
            if isinstance(error, OSError):
                raise LifecycleError(f"{label}: segment {name} can't be mapped: {error}") from error
            raise
        finally:
            os.close(file)

    @property
    def cause(self) -> str:
        """Why the content is unknown."""
        return bytes(self._bytes[CAUSE]).split(b"\0")[0].decode(errors="replace")

    @cause.setter
    def cause(self, text: str) -> None:
        size = CAUSE.stop - CAUSE.start
        self._bytes[CAUSE] = text.encode(errors="backslashreplace")[: size - 1].ljust(size, b"\0")

    @property
    def is_disposed(self) -> bool:
        """Whether this process has released everything."""
        return not self.close.alive

    @property
    def is_cut(self) -> bool:
        """Whether the file was truncated, so that access to the missing part would end the process."""
        return not self.is_disposed and self.locks.size() < self.form.total

    def close_first(self, part: Any) -> None:
        """Close something before the locks that prove it to be this process's."""
        self._held.insert(0, part)

    def release(self) -> None:
        """Drop the memory except a copy of the header."""
        header = memoryview(bytearray(PAGE))
        self.memory, self._bytes, self.words, self.slots = None, header, header.cast("q"), []

    def remove_name(self) -> None:
        """Remove the name, so that no other process can attach."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Reset in a forked child, which is not the maker and holds none of its parent's locks."""
        self.is_maker = False
        self.locks.reopen(USED)


def _over(mapping: mmap.mmap, form: Form, start: int) -> torch.Tensor:
    """Return a tensor over a part of the mapping, which lives as long as any such tensor."""
    if form.content_bytes == 0:
        return torch.empty(form.shape, dtype=form.dtype, device="cpu")
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=form.content_bytes, offset=start)
    return flat.view(form.dtype).view(form.shape)


_OPEN: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()
"""Segments that this process has open, by name; these need no check."""


def _close(held: list[Any], named: weakref.finalize[..., Any] | None) -> None:
    for part in held:
        part.close()
    if named is not None:  # once: later the name may be another's
        named()


def _remove_name(path: pathlib.Path, maker: int) -> None:
    if os.getpid() == maker:
        path.unlink(missing_ok=True)
