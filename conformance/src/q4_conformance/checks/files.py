"""Checks of readers of files: what they claim, how lazily they read, and what they make of damaged files.

The kit knows no kind of file. Where tensors lie in one, and so where its header is, shows by their random bytes.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.allocations import read_bytes, rise_of
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.files import READERS, FileSubject
from q4core import Q4Error, default_registry
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case

_NAMES = tuple(f"kit.{letter}" for letter in "abcdef")
"""As long as each other, so that one may take another's place in a file."""
_LARGE = 1 << 26
_PART = 8
"""Of a large file, one in so many bytes may be read as it is opened."""
_SECONDS = 5.0
_MUTANTS = 600
_MOST_CUTS = 250
_MEMORY = 1 << 28
_FOREIGN = {
    "nothing": b"",
    "a zero byte": b"\0",
    "zeros": bytes(4096),
    "random bytes": random.Random(3).randbytes(4096),  # noqa: S311  # bytes to read, no secret
    "a text": b"It was a dark and stormy night. " * 64,
    "a program": b"\x7fELF\2\1\1" + bytes(1024),
    "an archive": b"PK\3\4" + bytes(1024),
    "a pickle": b"\x80\x02}q\x00." + bytes(64),
}
_HUGE = (b"[" * 200_000, b'{"a":' * 50_000, b"9" * 5_000, bytes(100_000), b"\xff" * 64, b"-1", b"1e999", b'"', b",")
_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def tensors_of(names: tuple[str, ...] = _NAMES, seed: int = 5) -> dict[str, torch.Tensor]:
    """Return tensors of one shape, each of other random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 16, generator=generator) for name in names}


class Made:
    """A file that was made, with the ranges of its bytes that are no tensor's."""

    def __init__(self, subject: FileSubject, folder: Path) -> None:
        self.subject, self.path, self.tensors = subject, subject.path(folder), tensors_of()
        subject.make(self.path, self.tensors)
        self.data = self.path.read_bytes()
        found = sorted((self.data.find(stored_bytes(tensor)), tensor.nbytes) for tensor in self.tensors.values())
        if found[0][0] < 0:
            raise NotDeclaredError("files that hold tensors as they are")
        self.start, self.end = found[0][0], sum(found[-1])
        self.edges = [place for start, size in found for place in (start, start + size)]
        self.header = [*range(self.start), *range(self.end, len(self.data))]

    def put(self, data: bytes) -> Path:
        """Write other bytes in the file's place; a mapping of the former ones lives on."""
        self.path.unlink()
        self.path.write_bytes(data)
        return self.path

    def replaced(self, at: int, size: int, piece: bytes, data: bytes | None = None) -> bytes:
        """Return the bytes with a piece in the place of others; a number that counts the header counts it, too."""
        changed = bytearray(self.data if data is None else data)
        start = self.start + len(changed) - len(self.data)
        for place in range(min(at, start - 7, 64)):
            length = start - place - 8
            if len(piece) != size and at < start and changed[place : place + 8] == length.to_bytes(8, "little"):
                changed[place : place + 8] = (length + len(piece) - size).to_bytes(8, "little")
        changed[at : at + size] = piece
        return bytes(changed)


def _read_whole(subject: FileSubject, path: Path, what: str) -> dict[str, torch.Tensor] | Q4Error | None:
    """Return a file's tensors, the typed error that refuses it, or None where it is no file of this kind.

    Whatever else happens is a failure: another error, one that names no file, tensors that share bytes, too much time.
    """
    start = time.thread_time()
    answer: Q4Error | None = None
    tensors: dict[str, torch.Tensor] = {}
    try:
        if not subject.reader.recognises(path):
            return None
        source = subject.open(path)
        for name, info in source.dense.items():
            tensor = source.load(name)
            same = (tensor.dtype, tuple(tensor.shape)) == (info.dtype, tuple(info.shape))
            expect(same, f"{what}: {name} is announced as {info}, and is {tensor.dtype} {list(tensor.shape)}")
            tensors[name] = tensor
        for module in source.schema.layers:
            source.read(module)
    except Q4Error as error:
        answer = error
        expect(path.name in f"{error} {error.where}", f"{what}: the error does not name the file: {error}")
    except FailureError:
        raise
    except PLUGIN_FAULTS as error:
        raise FailureError(f"{what}: no typed error, but {describe_exception(error)}") from error
    taken = time.thread_time() - start
    expect(taken < _SECONDS, f"{what}: it takes {taken:.1f} s of processor time")
    if answer is not None:
        return answer
    ends = 0
    for first, size, name in sorted((item.data_ptr(), item.nbytes, name) for name, item in tensors.items()):
        expect(first >= ends or not size, f"{what}: it opens, and {name} shares bytes with another tensor")
        ends = max(ends, first + size)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def expect_tensors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """Expect the very tensors, bit for bit."""
    expect(set(got) == set(wanted), f"{what}: tensors {sorted(got)}, not {sorted(wanted)}")
    for name, tensor in wanted.items():
        forms = [f"{item.dtype} {list(item.shape)}" for item in (got[name], tensor)]
        expect(forms[0] == forms[1], f"{what}: {name} is {forms[0]}, not {forms[1]}")
        expect(stored_bytes(got[name]) == stored_bytes(tensor), f"{what}: other bytes of {name}")


def _in_folder(judge: Callable[[FileSubject, Path], str]) -> Callable[[Case, FileSubject], str]:
    """Return a check that judges in a folder of its own."""

    def run(_case: Case, subject: FileSubject) -> str:
        if reason := subject.missing(_case.check):
            raise NotDeclaredError(reason)
        with tempfile.TemporaryDirectory() as folder:
            return judge(subject, Path(folder))

    return run


def file_check(name: str) -> Callable[[Callable[[FileSubject, Path], str]], object]:
    """Enter a function of (subject, empty folder) as a check."""
    return lambda judge: check(name)(_in_folder(judge))


@file_check("file_detect")
def _check_detect(subject: FileSubject, folder: Path) -> str:
    own = subject.path(folder)
    subject.make(own, tensors_of())
    expect(subject.reader.recognises(own) is True, "its own file is not recognised")
    for name, text in _FOREIGN.items():
        path = folder / "foreign.bin"
        path.write_bytes(text)
        expect(not subject.reader.recognises(path), f"{name}: is claimed")
    others = [FileSubject(item) for name, item in default_registry().items(READERS).items() if name != subject.name]
    for other in (item for item in others if not item.lacks):
        other.make(other.path(folder), tensors_of())
        path = other.path(folder).rename(folder / "foreign.bin")
        expect(not subject.reader.recognises(path), f"a file of {other.name}: is claimed")
    odd = {"no file": folder / "none", "a folder": folder / "folder", "a pipe": folder / "pipe", "NUL": Path("a\0b")}
    odd["a folder"].mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(odd["a pipe"])
    for name, path in odd.items():
        try:
            subject.reader.recognises(path)
        except PLUGIN_FAULTS as error:
            raise FailureError(f"{name}: recognises raised {describe_exception(error)}") from error
    empty = subject.path(folder, "empty")
    empty.touch()
    answer = _read_whole(subject, empty, "an empty file")
    expect(answer is None or isinstance(answer, Q4Error), "an empty file opens")
    return f"{len(_FOREIGN) + len(others)} foreign files left alone"


@file_check("file_whole")
def _check_whole(subject: FileSubject, folder: Path) -> str:
    special = torch.tensor([0.0, -0.0, 1e-42, 3e38, float("inf"), float("-inf"), float("nan"), -1.5])
    wanted = {**tensors_of(), "special": special, "half": torch.randn(3, 32).half(), "kit.cube": torch.randn(2, 3, 8)}
    path = subject.path(folder)
    subject.make(path, wanted)
    before = path.read_bytes()
    source = subject.open(path)
    got = {name: source.load(name) for name in source.dense}
    expect_tensors(got, wanted, "as opened")
    expect_tensors(subject.read(path), wanted, "read once more")
    source.close()
    expect_tensors(got, wanted, "after it was closed")
    for tensor in got.values():
        tensor.zero_()
    expect(path.read_bytes() == before, "what is written into a tensor comes into the file")
    return f"{len(wanted)} tensors"


def _mappings(path: Path) -> list[tuple[int, int]]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise NotTestableError("the system does not list mappings") from error
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [(int(first, 16), int(last, 16)) for first, last in spans]


@file_check("file_lazy")
def _check_lazy(subject: FileSubject, folder: Path) -> str:
    large = {"kit.large": torch.zeros(_LARGE // 4, dtype=torch.float32).reshape(-1, 1024), **tensors_of()}
    path = subject.path(folder)
    subject.make(path, large)
    source: Any = None

    def opening() -> None:
        nonlocal source
        source = subject.open(path)

    opening()
    source.close()
    source, before = None, read_bytes()
    rise = rise_of(opening)
    taken, limit = read_bytes() - before, _LARGE // _PART
    expect(rise < limit, f"opening a file of {_LARGE:,} bytes takes {rise:,} bytes of memory")
    expect(taken < limit, f"opening a file of {_LARGE:,} bytes reads {taken:,} of them")
    tensor: torch.Tensor | None = None

    def loading() -> None:
        nonlocal tensor
        tensor = source.load("kit.large")

    rise = rise_of(loading)
    expect(rise < limit, f"a tensor of {_LARGE:,} bytes takes {rise:,} bytes of memory as it is given")
    start = 0 if tensor is None else tensor.data_ptr()
    is_view = any(first <= start < last for first, last in _mappings(path))
    expect(is_view, "a tensor is no view of the mapped file")
    del tensor
    source.close()
    copied = subject.open(subject_copy := path.rename(subject.path(folder, "copied")), copy=True)
    expect_tensors({name: copied.load(name) for name in _NAMES}, tensors_of(), "copied")
    expect(not _mappings(subject_copy), "with copy=True the file is mapped")
    copied.close()
    return f"{_LARGE:,} bytes opened by reading {taken:,}"


@file_check("file_cut")
def _check_cut(subject: FileSubject, folder: Path) -> str:
    made = Made(subject, folder)
    step = max(1, made.start // _MOST_CUTS)
    near = {place + by for place in made.edges for by in (-1, 0, 1)}
    lengths = sorted({*range(0, made.start, step), *near, *range(made.end, len(made.data), 7)})
    for length in (item for item in lengths if item < len(made.data)):
        what = f"cut to {length} of {len(made.data)} bytes"
        answer = _read_whole(subject, made.put(made.data[:length]), what)
        if isinstance(answer, dict):
            expect(length >= made.end, f"{what}, it opens")
            expect_tensors(answer, made.tensors, what)
    return f"{len(lengths)} lengths"


def _mutants(made: Made) -> Iterator[tuple[str, bytes]]:
    """Yield damaged files: bits, numbers and texts of the header changed, moved, repeated or blown up."""
    draw = random.Random(20261126)  # noqa: S311  # reproducible faults, no secrets
    data, digits = made.data, [item.span() for item in re.finditer(rb"\d+", made.data[: made.start])]
    for index in range(_MUTANTS):
        kind, at = index % 6, draw.choice(made.header)
        if kind == 0:
            yield f"bit {index % 8} of byte {at} flipped", made.replaced(at, 1, bytes([data[at] ^ 1 << index % 8]))
        elif kind in {1, 2}:
            number, size = draw.choice(_EXTREMES), 4 * kind
            piece = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
            yield f"{number} in {size} bytes from {at}", made.replaced(at, size, piece)
        elif kind == 3:  # noqa: PLR2004  # the fourth kind
            first, size = draw.choice(made.header), draw.choice((4, 8))
            piece = data[first : first + size]
            yield f"{size} bytes from {first} repeated at {at}", made.replaced(at, size, piece)
        elif kind == 4 and digits:  # noqa: PLR2004  # the fifth
            (first, last), other = draw.choice(digits), draw.choice(digits)
            piece = draw.choice((data[slice(*other)], str(draw.choice(_EXTREMES)).encode(), b"-1", b"1.5"))
            yield f"{piece.decode()} in place of the digits at {first}", made.replaced(first, last - first, piece)
        else:
            piece = draw.choice(_HUGE)
            yield f"{len(piece)} bytes {piece[:8]!r}… at {at}", made.replaced(at, 0, piece)


@file_check("file_hostile")
def _check_hostile(subject: FileSubject, folder: Path) -> str:
    made, refused, opened = Made(subject, folder), 0, 0

    def judge() -> None:
        nonlocal refused, opened
        for what, data in _mutants(made):
            answer = _read_whole(subject, made.put(data), what)
            refused += not isinstance(answer, dict)
            opened += isinstance(answer, dict)

    between = made.data[made.start : made.end]
    if not any(name.encode() in between for name in _NAMES):  # facts between tensors say no places, which could overlap
        judge_twins(made)
    rise = rise_of(judge)
    expect(rise < _MEMORY, f"damaged files of {len(made.data):,} bytes take {rise:,} bytes of memory")
    expect(refused, "no damaged header is refused")
    return f"{refused} damaged files refused, {opened} read"


def _refused(made: Made, data: bytes, what: str) -> str:
    """Return the text of the error that refuses a damaged file."""
    answer = _read_whole(made.subject, made.put(data), what)
    if not isinstance(answer, Q4Error):
        raise FailureError(f"{what}: it opens")
    problems = getattr(answer, "problems", ())
    return "\n".join(map(str, (answer, *problems)))


def _places(made: Made) -> list[tuple[int, bytes]]:
    """Return where each tensor's name is in the header, in that order."""
    found = [(place, name) for name in map(str.encode, _NAMES) if (place := _find(made, name)) >= 0]
    if len(found) < len(_NAMES):
        raise NotDeclaredError("files that hold names as they are")
    return sorted(found)


def _find(made: Made, name: bytes) -> int:
    place = made.data.find(name, 0, made.start)
    return place if place >= 0 else made.data.find(name, made.end)


def judge_twins(made: Made) -> None:
    """Expect two tensors that have the places of two others to be refused, all at once."""
    places, data = _places(made), made.data
    for index in (3, 1):  # from behind, so that what changes in size moves no place that is still needed
        (first, name), (second, _), (third, _) = places[index - 1 : index + 2]
        facts = data[first + len(name) : second]
        at = second + len(name)
        data = made.replaced(at, third - at, facts, data)
    text = _refused(made, data, "two tensors in the places of two others")
    names = [name.decode() for _, name in places]
    for pair in (names[:2], names[2:4]):
        expect(
            any(item in text for item in pair), f"of tensors in one place, {' and '.join(pair)} are not named: {text}"
        )


@file_check("file_names")
def _check_names(subject: FileSubject, folder: Path) -> str:
    made = Made(subject, folder)
    data, wanted = made.data, [_NAMES[0], _NAMES[2]]
    for name, taken in ((_NAMES[1], wanted[0]), (_NAMES[3], wanted[1])):
        place = data.find(name.encode())  # in one header, or next to its tensor, whose random bytes hold no name
        expect(place >= 0, f"the name {name} is not in the file")
        data = made.replaced(place, len(name), taken.encode(), data)
    text = _refused(made, data, "two names that are there twice")
    missed = [name for name in wanted if name not in text]
    expect(not missed, f"two names are there twice, and {', '.join(missed)} is not reported: {text}")
    return text.splitlines()[0]


@file_check("file_parts")
def _check_parts(subject: FileSubject, folder: Path) -> str:
    wanted, other = tensors_of(), tensors_of(tuple(f"alt.{letter}" for letter in "abcdefghi"), seed=6)
    models = {}
    for name, tensors in (("model", wanted), ("other", other)):
        (folder / name).mkdir()
        models[name] = subject.make_parts(folder / name, tensors)
    main, *parts = models["model"]
    expect(len(parts) > 1, f"a model in several files has {len(parts)} parts besides the one that opens it")
    expect_tensors(subject.read(main), wanted, "all parts")
    for index, part in enumerate(parts):
        whole = part.read_bytes()
        ways = {
            "missing": None,
            "another part": parts[index - 1].read_bytes(),
            "a part of another model": models["other"][1 + index].read_bytes(),
            "cut short": whole[: len(whole) // 2],
        }
        for way, data in ways.items():
            part.unlink()
            if data is not None:
                part.write_bytes(data)
            error = raised(Q4Error, lambda: subject.open(main).close(), f"{part.name} is {way}, and the model opens")
            named = any(item.name in f"{error} {error.where}" for item in (part, main))
            expect(named, f"{part.name} is {way}, and the error names no file: {error}")
            if data is not None:
                part.unlink()
            part.write_bytes(whole)
    expect_tensors(subject.read(main), wanted, "all parts again")
    return f"{len(parts)} parts besides {main.name}"
