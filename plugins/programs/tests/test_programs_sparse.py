"""``SparseWeight``: the synapses that were given, in pieces, in a file, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import q4core as q4
from q4_programs import SparseBuilder, SparseWeight

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = 23


def draw(targets: int = 50, count: int = 700, sources: int = SOURCES) -> dict[str, Any]:
    """Return random synapses."""
    random = torch.Generator().manual_seed(targets + count)
    return {
        "source": torch.randint(sources, (count,), generator=random),
        "target": torch.randint(targets, (count,), generator=random),
        "weight": 80 + 8 * torch.randn(count, generator=random),
        "delay": torch.randint(1, 256, (count,), generator=random),
    }


def in_order(given: dict[str, torch.Tensor]) -> list[list[tuple[int, float, int]]]:
    """Return target, weight and delay of each source's synapses, by target, equals as they were given."""
    found: list[list[tuple[int, float, int]]] = [[] for _ in range(SOURCES)]
    for source, *rest in zip(*(value.tolist() for value in given.values()), strict=True):
        found[source].append(tuple(rest))
    return [sorted(items, key=lambda item: item[0]) for items in found]


WIDTHS = [(50, 700, torch.uint8), (3_000, 700, torch.uint8), (70_000, 9_000, torch.uint8), (70_000, 700, torch.int16)]


@pytest.mark.parametrize(("targets", "count", "dtype"), WIDTHS)
def test_synapses_are_those_that_were_given(targets: int, count: int, dtype: torch.dtype) -> None:
    """By source, then target, equals in their order: targets and delays exactly, weights within half a level."""
    given = draw(targets, count)
    made = SparseWeight.of(**given, sources=SOURCES, targets=targets)
    made.check()
    assert (made.synapses, made.longest, made.gaps.dtype) == (count, int(given["delay"].max()), dtype)
    level = float(given["weight"].max() - given["weight"].min()) / 15
    for source, wanted in enumerate(in_order(given)):
        target, weight, delay = made.synapses_of(torch.tensor([source]))
        assert [(item[0], item[2]) for item in wanted] == [*zip(target.tolist(), delay.tolist(), strict=True)]
        assert all(abs(weight[i].item() - item[1]) <= 0.51 * level for i, item in enumerate(wanted))
    some = torch.tensor([0, 4, 5, SOURCES - 1])
    parts = [made.with_places(source[None])[1:] for source in some]
    place, *found = made.with_places(some)
    assert all(torch.equal(torch.cat(items), one) for items, one in zip(zip(*parts, strict=True), found, strict=True))
    assert place.bincount(minlength=4).tolist() == [len(items[0]) for items in parts]
    assert [len(item) for item in made.synapses_of(some[:0])] == [0, 0, 0]


def test_weights_are_those_of_q4_1() -> None:
    """Without gaps that are too wide, a weight has the bits that 32 neighbours have in Q4_1."""
    given = draw()
    order = (given["source"] * 50 + given["target"]).argsort(stable=True)
    padded = torch.nn.functional.pad(given["weight"][order][None], (0, 4), mode="replicate")
    wanted = q4.dequantize(q4.quantize(padded, "q4_1"))[0, :700]
    made = SparseWeight.of(**given, sources=SOURCES, targets=50)
    assert torch.equal(made.synapses_of(torch.arange(SOURCES))[1], wanted)


@pytest.mark.parametrize(("targets", "count", "dtype"), WIDTHS)
def test_pieces_give_the_same_bits(targets: int, count: int, dtype: torch.dtype) -> None:
    """Sources may come in pieces of any size, some without synapses: the tensors are those of one piece."""
    given = draw(targets, count)
    given["source"][given["source"] == 7] = 8
    whole = SparseWeight.of(**given, sources=SOURCES, targets=targets)
    for size in (1, 2, 5):
        builder = SparseBuilder(SOURCES, targets, count)
        for low in range(0, SOURCES, size):
            mine = (given["source"] >= low) & (given["source"] < low + size)
            if bool(mine.any()):
                builder.add(*(value[mine] for value in given.values()))
        made = builder.finish()
        assert made.gaps.dtype is dtype
        assert all(map(torch.equal, made.tensors(), whole.tensors()))


@pytest.mark.parametrize(("targets", "count", "dtype"), WIDTHS)
def test_cuts_give_each_part_its_own_targets(targets: int, count: int, dtype: torch.dtype) -> None:
    """The entries of a part, walked from the target before them, are those of its targets, and none is missing."""
    made = SparseWeight.of(**draw(targets, count), sources=SOURCES, targets=targets)
    gaps = made.gaps.long() & (0xFF if dtype is torch.uint8 else 0xFFFF)
    bounds = [targets // 3, targets // 3, targets // 2]
    entries, before = made.cuts(bounds)
    walked = 0
    for source in range(SOURCES):
        for part, (low, high) in enumerate(zip([0, *bounds], [*bounds, targets], strict=True)):
            first, end = entries[source, part : part + 2].tolist()
            found = before[source, part].item() + gaps[first:end].cumsum(0)
            assert bool(((found >= low) & (found < high)).all())
            walked += end - first
    assert walked == int(made.starts[-1])
    whole = made.cuts([])
    assert torch.equal(whole[0], torch.stack([made.starts[:-1], made.starts[1:]], 1))
    assert torch.equal(whole[1][:, 0], made.first)


@pytest.mark.parametrize(("targets", "count", "dtype"), WIDTHS)
def test_the_first_synapses_alone(targets: int, count: int, dtype: torch.dtype) -> None:
    """The head of a weight has the first sources' synapses, of the last one some, over the same memory."""
    made = SparseWeight.of(**draw(targets, count), sources=SOURCES, targets=targets)
    every = torch.arange(SOURCES)
    whole = made.with_places(every)
    for entries in (1, 32, 100, 352):
        head = made.head(entries)
        head.check()
        assert head.gaps.dtype is dtype
        assert len(head.steps) == max(entries // 32 * 32, 32)
        assert head.steps.data_ptr() == made.steps.data_ptr()
        found = head.with_places(every)
        assert 0 < len(found[0]) <= len(head.steps)
        assert all(torch.equal(one, other[: len(one)]) for one, other in zip(found, whole, strict=True))
    assert made.head(len(made.steps)) is made


def test_a_synapse_takes_less_than_2_7_bytes() -> None:
    """A byte for the target, one for the delay, half for the code, an eighth for the scale, and the source's share."""
    random = torch.Generator().manual_seed(0)
    count, size = 400_000, 2_000
    source, target = (torch.randint(size, (count,), generator=random) for _ in range(2))
    made = SparseWeight.of(source, target, torch.ones(count), 1 + source % 15, sources=size, targets=size)
    assert made.nbytes / made.synapses == pytest.approx(2.625 + 12 * size / count, abs=1e-3) == 2.685


def test_a_weight_goes_to_a_file_and_back(tmp_path: Path) -> None:
    """A file has the same tensors, mapped or copied; a copy of the weight is the weight, a pickled one equal."""
    made = SparseWeight.of(**draw(3_000), sources=SOURCES, targets=3_000)
    path = made.save(tmp_path / "synapses.safetensors")
    for found in (SparseWeight.load(path), SparseWeight.load(path, copy=True), pickle.loads(pickle.dumps(made))):  # noqa: S301  # our own
        assert (found.sources, found.targets) == (SOURCES, 3_000)
        assert all(map(torch.equal, found.tensors(), made.tensors()))
    assert copy.deepcopy(made) is made


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """Another ending, and a folder that is not there to be made, are typed errors; an older file stays."""
    made = SparseWeight.of(**draw(), sources=SOURCES, targets=50)
    with pytest.raises(q4.CheckpointError, match=r"path must be a file that ends in \.safetensors"):
        made.save(tmp_path / "synapses.gguf")
    (tmp_path / "file").write_text("old")
    with pytest.raises(q4.CheckpointError):
        made.save(tmp_path / "file" / "synapses.safetensors")
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def hostile() -> list[Any]:  # noqa: C901  # one function per kind of change
    """Return changes of a file, each with a part of the message."""

    def put(name: str, place: int, value: int) -> Any:
        def change(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
            tensors[f"synapses.{name}"].view(-1)[place] = value

        return change

    def tell(**new: Any) -> Any:
        return lambda _, facts: facts.update(new)

    def cast(name: str, dtype: torch.dtype) -> Any:
        def change(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
            tensors[f"synapses.{name}"] = tensors[f"synapses.{name}"].to(dtype)

        return change

    def drop(name: str) -> Any:
        return lambda tensors, _: tensors.pop(f"synapses.{name}")

    def cut(name: str) -> Any:
        def change(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
            tensors[f"synapses.{name}"] = tensors[f"synapses.{name}"][:-1].clone()

        return change

    def more(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        tensors["more"] = torch.ones(1)

    def none(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        tensors["synapses.steps"].zero_()

    return [
        (put("starts", 0, 1), "starts must be rising from 0"),
        (put("starts", 5, 1 << 40), "starts must be rising"),
        (put("starts", SOURCES, 1 << 40), "starts must be rising"),
        (put("starts", 3, -1), "starts must be rising"),
        (put("first", 0, -1), "first must be in 0 … 2999"),
        (put("first", 0, 3_000), "first must be in 0 … 2999"),
        (put("gaps", 1, 255), "gaps must be"),
        (put("gaps", 0, 1), "gaps must be 0 for the first entry"),
        (put("steps", -1, 9), "steps must be 0 behind"),
        (none, "steps must be of a synapse at least"),
        (put("levels", 0, 0x7C00), "levels must be finite"),
        (put("levels", 3, 0x7E01), "levels must be finite"),
        (tell(sources=SOURCES - 1), "starts must be int64"),
        (tell(sources=True), "sources must be a positive"),
        (tell(sources=1 << 60), "sources must be a positive"),
        (tell(targets=0), "targets must be a positive"),
        (tell(targets=2_000), "must be in 0 … 1999|such that targets are below 2000"),
        (tell(targets="3000"), "targets must be a positive"),
        (tell(kind="sparse synapses 2"), "metadata q4_sparse must be an object"),
        (tell(more=1), "metadata q4_sparse must be an object"),
        *((drop(name), "tensors must be exactly") for name in ("starts", "first", "gaps", "steps", "codes", "levels")),
        *((cut(name), f"{name} must be") for name in ("starts", "first", "gaps", "codes", "levels")),
        (cut("steps"), "must be"),
        *((cast(name, torch.float32), f"{name} must be") for name in ("starts", "first", "gaps", "steps", "levels")),
        (cast("gaps", torch.int8), "gaps must be uint8 or int16"),
        (more, "tensors must be exactly"),
    ]


@pytest.mark.parametrize(("change", "message"), hostile())
def test_hostile_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    """Whatever a file says of its synapses is checked: each illegal number is an error that names it and the file."""
    path = SparseWeight.of(**draw(3_000), sources=SOURCES, targets=3_000).save(tmp_path / "synapses.safetensors")
    facts = {"kind": "sparse synapses 1", "sources": SOURCES, "targets": 3_000}
    tensors = load_file(path)
    change(tensors, facts)
    save_file(tensors, path, {"q4_sparse": json.dumps(facts)})
    with pytest.raises(q4.CheckpointError, match=message) as caught:
        SparseWeight.load(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("text", ["", "[1]", "nothing", "[" * 100_000, '{"kind": 1}'])
def test_hostile_headers_are_refused(text: str, tmp_path: Path) -> None:
    """A header that is no JSON, or none of ours, is a typed error, as are files of other kinds and damaged ones."""
    made = SparseWeight.of(**draw(), sources=SOURCES, targets=50)
    path = made.save(tmp_path / "synapses.safetensors")
    tensors = load_file(path)
    save_file(tensors, path, {"q4_sparse": text})
    with pytest.raises(q4.CheckpointError, match="metadata q4_sparse must be an object"):
        SparseWeight.load(path)
    save_file(tensors, path)
    with pytest.raises(q4.CheckpointError, match="metadata must be a file with q4_sparse in its header"):
        SparseWeight.load(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(q4.CheckpointError, match="header"):
        SparseWeight.load(path)
    with pytest.raises(q4.CheckpointError):
        SparseWeight.load(tmp_path / "none.safetensors")


def test_pieces_that_do_not_follow_are_refused() -> None:
    """A source of a piece before, more synapses than were said, and none at all are typed errors."""
    ones = torch.ones(1, dtype=torch.int64)
    builder = SparseBuilder(3, 4, 2, label="here")
    builder.add(ones, ones, torch.ones(1), ones)
    with pytest.raises(q4.InputError, match="here: source must be in 2 … 2, got 1"):
        builder.add(ones, ones, torch.ones(1), ones)
    with pytest.raises(q4.InputError, match="here: synapses must be 2 at most, as was said, got 3"):
        builder.add(torch.full((2,), 2), torch.zeros(2, dtype=torch.int64), torch.ones(2), 1 + torch.arange(2))
    builder.add(2 * ones, ones, torch.ones(1), ones)
    assert builder.finish().synapses == 2
    with pytest.raises(q4.InputError, match="synapses must be 1 or more, got 0"):
        SparseBuilder(3, 4, 2).finish()
    with pytest.raises(q4.InputError, match="targets must be a positive whole number"):
        SparseBuilder(3, 0, 2)


def test_tensors_that_do_not_fit_are_refused() -> None:
    """A weight of other tensors' shapes, dtypes or order in memory is a typed error."""
    made = SparseWeight.of(**draw(), sources=SOURCES, targets=50)
    for name, value in (
        ("starts", made.starts.int()),
        ("first", made.first[1:]),
        ("gaps", made.gaps[:-32]),
        ("codes", made.codes[None]),
        ("levels", made.levels.T.contiguous().T),
        ("steps", made.steps[:0]),
    ):
        with pytest.raises(q4.InputError, match="must be"):
            attrs.evolve(made, **dict[str, Any]({name: value}))
