"""Detection: each module by itself, every problem at once, nothing guessed."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import q4core as q4
from q4core import Schema, detect, detect_all, detect_or_fail, validate
from q4core.schema import MARKER, SIMPLE_DIALECTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NF4 = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)


def _trio(module: str = "proj") -> dict[str, torch.Tensor]:
    return {
        f"{module}.weight": torch.zeros(6, 64, dtype=torch.uint8),
        f"{module}.absmax": torch.ones(12),
        f"{module}.quant_map": NF4.clone(),
    }


def _pair(module: str = "proj") -> dict[str, torch.Tensor]:
    return {
        f"{module}.qdata": torch.zeros(6, 32, dtype=torch.uint8),
        f"{module}.scale": torch.zeros(6, 4, dtype=torch.float8_e4m3fn),
    }


def _dense() -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.ones(4), "head.weight": torch.ones(3, 4), "proj.bias": torch.zeros(6)}


def _facts(problems: tuple[q4.Problem, ...]) -> list[tuple[str, str]]:
    return [(problem.code, problem.key) for problem in problems]


class Twin(q4.Dialect):
    """Claims each module with a key ``twin``; facts are adjustable."""

    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})

    def __init__(
        self, name: str, *, named: bool = False, unsupported: bool = False, error: Exception | None = None
    ) -> None:
        self.name = name  # type: ignore[misc]  # each instance is another dialect
        self.named = named
        self.unsupported = unsupported
        self.error = error

    def find(self, catalogue: q4.Catalogue) -> Iterator[q4.LayerSchema]:
        """Yield each module with the key."""
        if self.error is not None:
            raise self.error
        for module in catalogue.modules_with("twin"):
            problem = q4.Problem("unsupported", module, "of a readable dialect", self.name)
            yield q4.LayerSchema(
                module=module,
                dialect=self.name,
                format="nvfp4",
                keys={"qdata": f"{module}.twin"},
                problems=[problem] if self.unsupported else [],
                named=self.named,
            )

    def validate(self, layer: q4.LayerSchema, catalogue: q4.Catalogue) -> Iterator[q4.Problem]:
        """Ask for uint8."""
        yield from self.expect(catalogue, layer.keys["qdata"], dtypes={torch.uint8}, shape=(None,))

    def read(self, layer: q4.LayerSchema, load: Callable[[str], torch.Tensor]) -> q4.PackedWeight:
        """Read nothing."""
        raise NotImplementedError


TWIN = {"proj.twin": torch.zeros(4, dtype=torch.uint8)}


def test_nothing_of_four_bits_is_none() -> None:
    """Dense tensors alone, or none at all, give None."""
    assert detect(_dense()) is None
    assert detect({}) is None
    assert detect_all(_dense()) == ()


def test_each_module_is_decided_by_itself() -> None:
    """A file may mix dialects; each layer gets its own, and what is left is dense, in the file's order."""
    schema = detect({**_pair("b"), **_dense(), **_trio("a")})
    assert schema is not None
    assert {module: layer.dialect for module, layer in schema.layers.items()} == {
        "b": "simple-nvfp4",
        "a": "simple-nf4",
    }
    assert list(schema.layers) == ["b", "a"]
    assert schema.dense == ("norm.weight", "head.weight", "proj.bias")
    assert schema.dialects == ("simple-nvfp4", "simple-nf4")
    assert validate(schema, {**_pair("b"), **_trio("a")}) == ()


@pytest.mark.parametrize("kind", ["info", "meta"])
def test_metadata_is_enough(kind: str) -> None:
    """Names, dtypes and shapes suffice; what only numbers decide is noted as assumed."""
    tensors = {
        name: q4.TensorInfo(item.dtype, item.shape) if kind == "info" else item.to("meta")
        for name, item in {**_pair("b"), **_trio("a")}.items()
    }
    schema = detect_or_fail(tensors)
    assert schema.layers["a"].shape == (6, 128)
    assert schema.layers["a"].block_size == 64
    assert schema.layers["b"].shape == (6, 64)
    assert any("code book was not read" in note for note in schema.layers["a"].notes)


def test_layer_knows_its_bytes() -> None:
    """The stored bytes of a layer are those of its tensors, side tensors included."""
    schema = detect_or_fail({**_trio(), **_dense()})
    assert schema.layers["proj"].nbytes == 6 * 64 + 12 * 4 + 16 * 4


def test_module_names_do_not_matter() -> None:
    """Modules at any depth are found, also where one module's name is the beginning of another's."""
    names = ["a", "a.b", "a.b.c", "model.layers.0.mlp.experts.11.down_proj"]
    tensors = {key: item for name in names for key, item in _trio(name).items()}
    assert list(detect_or_fail(tensors).layers) == names


def test_all_problems_come_at_once() -> None:
    """Missing keys, unknown keys, dtypes and shapes of several layers are reported together, each once."""
    tensors = {**_trio("a"), **_pair("b"), **_pair("c"), **_trio("d")}
    del tensors["a.absmax"]
    tensors["b.scale"] = torch.zeros(6, 4)
    tensors["c.qdata"] = torch.zeros(5, 32, dtype=torch.uint8)
    tensors["d.absmax_2"] = torch.zeros(1)
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(tensors)
    expected = {
        ("missing_key", "a.absmax"),
        ("dtype", "b.scale"),
        ("shape", "c.scale"),
        ("unknown_key", "d.absmax_2"),
    }
    assert set(_facts(caught.value.problems)) == expected
    assert len(caught.value.problems) == len(expected)
    for _, key in expected:
        assert key in str(caught.value)


def test_unknown_scale_of_a_module_below_is_not_this_modules() -> None:
    """Only a module's own tensors count as its scales, not those of the modules inside it."""
    assert detect_or_fail({**_trio("a"), **_pair("a.inner")}).layers.keys() == {"a", "a.inner"}


def test_nothing_found_is_an_error_where_a_schema_is_required() -> None:
    """``detect_or_fail`` says that no layer is in a known dialect, and lists them."""
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(_dense())
    assert "simple-nf4" in str(caught.value)


@pytest.mark.parametrize("name", ["simple-nvfp", "bitsandbyte", ""])
def test_unknown_dialect_is_an_error_with_names(name: str) -> None:
    """An unknown dialect is refused with the names that there are, and the closest."""
    with pytest.raises(q4.DialectError) as caught:
        detect(_trio(), dialect=name, dialects=SIMPLE_DIALECTS)
    assert "simple-nf4, simple-nvfp4" in str(caught.value)
    assert caught.value.value == name
    if name == "simple-nvfp":
        assert caught.value.details["closest"] == "simple-nvfp4"
    else:
        assert caught.value.hint == "Install the plugin that brings it; see `q4 doctor`."


def test_dialect_that_no_layer_allows_is_a_problem() -> None:
    """Asking for a dialect that no layer is in does not give the others instead."""
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(_trio(), dialect="simple-nvfp4")
    assert _facts(caught.value.problems) == [("dialect", "dialect")]


def test_unknown_option_is_an_error_with_names() -> None:
    """An option that no dialect has is refused with the names that there are."""
    with pytest.raises(q4.DialectError) as caught:
        detect(_trio(), options={"nibbles": "low_first"})
    assert (caught.value.value, "nibble_order" in str(caught.value)) == ("nibbles", True)


def test_ambiguity_names_the_candidates_and_the_way_out() -> None:
    """Keys that fit two dialects alike are a problem, never a guess."""
    dialects = [Twin("one"), Twin("two")]
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(TWIN, dialects=dialects)
    assert _facts(caught.value.problems) == [("ambiguous", "proj")]
    assert "one or two" in str(caught.value)
    assert "dialect=" in str(caught.value)
    assert [layer.dialect for layer in detect_all(TWIN, dialects=dialects)] == ["one", "two"]


@pytest.mark.parametrize(
    ("first", "second", "told", "marked", "chosen"),
    [
        ("one", "two", "two", None, "two"),
        ("one", "two", "one", "two", "one"),  # the caller's word goes before the file's
        ("one", "two", None, "two", "two"),
        ("one", "two", None, "three", None),
        ("one!", "two", None, None, "one"),
        ("one!", "two", "two", None, "two"),
        ("one!", "two!", None, None, None),
        ("one!", "two!", None, "one", "one"),
    ],
)
def test_who_resolves_ambiguity(
    first: str, second: str, told: str | None, marked: str | None, chosen: str | None
) -> None:
    """First the caller, then our own marker, then whichever dialect the metadata names ("!"); else it stays open."""
    dialects = [Twin(name.rstrip("!"), named=name.endswith("!")) for name in (first, second)]
    metadata = {} if marked is None else {MARKER: marked}
    schema = detect(TWIN, metadata=metadata, dialect=told, dialects=dialects)
    assert schema is not None
    layer = schema.layers["proj"]
    if chosen is None:
        assert _facts(layer.problems) == [("ambiguous", "proj")]
    else:
        assert (layer.dialect, layer.problems) == (chosen, ())


def test_order_of_dialects_does_not_matter() -> None:
    """No answer depends on the order in which dialects are registered."""
    tensors = {**_trio("a"), **_pair("b"), **TWIN}
    dialects = [*SIMPLE_DIALECTS, Twin("one"), Twin("two")]
    assert detect(tensors, dialects=dialects) == detect(tensors, dialects=reversed(dialects))


def test_what_is_known_but_not_read_is_neither_layer_nor_dense() -> None:
    """A recognised layer that no dialect reads is listed as unsupported, with its reason; the others are read."""
    schema = detect_or_fail({**TWIN, **_pair("b")}, dialects=[*SIMPLE_DIALECTS, Twin("one", unsupported=True)])
    assert _facts(schema.unsupported) == [("unsupported", "proj")]
    assert list(schema.layers) == ["b"]
    assert schema.dense == ()


def test_only_unsupported_layers_are_an_error_where_a_schema_is_required() -> None:
    """``detect_or_fail`` refuses a checkpoint of which it can read nothing, and says why."""
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(TWIN, dialects=[Twin("one", unsupported=True)])
    assert _facts(caught.value.problems) == [("unsupported", "proj")]


def test_dialect_that_raises_does_not_lose_the_others_answers(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin's dialect that fails is left out with a warning that names it, and an event."""
    with pytest.warns(q4.Q4PluginWarning, match="'broken' raised ZeroDivisionError"):
        schema = detect(_pair(), dialects=[*SIMPLE_DIALECTS, Twin("broken", error=ZeroDivisionError())])
    assert schema is not None
    assert list(schema.layers) == ["proj"]
    (record,) = [item for item in caplog.records if getattr(item, "q4_event", None) == "q4.plugin"]
    assert getattr(record, "q4_fields", {})["dialect"] == "broken"


def test_validate_needs_the_schemas_dialects() -> None:
    """A schema whose dialect is not at hand is refused by name."""
    schema = detect_or_fail(TWIN, dialects=[Twin("one")])
    with pytest.raises(q4.DialectError) as caught:
        validate(schema, TWIN)
    assert caught.value.value == "one"


def test_schema_is_a_value() -> None:
    """Equal contents make equal schemas; converters take any iterable."""
    layer = detect_or_fail(_pair()).layers["proj"]
    assert Schema(layers={"proj": layer}, dense=["x"]) == Schema(layers={"proj": layer}, dense=("x",))
    assert attrs.evolve(layer, notes=["a"]).notes == ("a",)


_BAD_ARGUMENTS: dict[str, tuple[Any, dict[str, Any], type[q4.Q4Error], str]] = {
    "None": (None, {}, q4.SchemaError, "tensors"),
    "a list": ([1], {}, q4.SchemaError, "tensors"),
    "a number as tensor": ({**_trio(), "a.weight": 3}, {}, q4.SchemaError, "tensors['a.weight']"),
    "None as tensor": ({"a.weight": None}, {}, q4.SchemaError, "tensors['a.weight']"),
    "another library's array": (
        {"a.weight": types.SimpleNamespace(dtype="uint8", shape=(1,))},
        {},
        q4.SchemaError,
        "tensors['a.weight']",
    ),
    "a number as name": ({3: torch.ones(1)}, {}, q4.SchemaError, "tensors"),
    "metadata as a number": (_trio(), {"metadata": 3}, q4.ConfigError, "metadata"),
    "a number in metadata": (_trio(), {"metadata": {"x": 3}}, q4.ConfigError, "metadata['x']"),
    "config as a list": (_trio(), {"config": [1]}, q4.ConfigError, "config"),
    "config with a number as name": (_trio(), {"config": {1: 1}}, q4.ConfigError, "config"),
    "options as a text": (_trio(), {"options": "nibble_order"}, q4.ConfigError, "options"),
    "load as a dict": (_trio(), {"load": {}}, q4.ConfigError, "load"),
}


@pytest.mark.parametrize("case", _BAD_ARGUMENTS)
def test_arguments_of_a_wrong_kind_are_named(case: str) -> None:
    """What is no mapping, no tensor or no text is an error with name, rule and value, in each of the four functions."""
    tensors, arguments, kind, name = _BAD_ARGUMENTS[case]
    schema = detect_or_fail(_trio())
    calls: list[Callable[[], object]] = [
        lambda: detect(tensors, **arguments),
        lambda: detect_all(tensors, **arguments),
        lambda: detect_or_fail(tensors, **arguments),
        lambda: validate(schema, tensors, **arguments),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.name == name
        assert caught.value.rule is not None
        assert caught.value.has_value


@pytest.mark.parametrize("schema", [None, (), {"proj": 1}])
def test_a_schema_of_another_kind_is_named(schema: Any) -> None:
    """``validate`` takes what ``detect`` gives, and None is what it gives where there is nothing."""
    with pytest.raises(q4.SchemaError) as caught:
        validate(schema, _trio())
    assert (caught.value.name, caught.value.value) == ("schema", type(schema).__name__)


@pytest.mark.parametrize("config", [[1], 3])
def test_opening_with_a_config_of_another_kind_is_named(config: Any, tmp_path: Path) -> None:
    """The same holds for a file."""
    q4.save_checkpoint(tmp_path / "x.safetensors", {"a": q4.quantize(torch.ones(4, 64), "nf4")}, dialect="simple-nf4")
    with pytest.raises(q4.ConfigError) as caught:
        q4.open(tmp_path / "x.safetensors", config=config)
    assert caught.value.name == "config"
    with pytest.raises(q4.ConfigError) as caught:
        q4.open(tmp_path / "x.safetensors", options=config)
    assert caught.value.name == "options"


def test_an_open_question_stays_open() -> None:
    """A layer that several dialects claim is ambiguous for ``validate`` too."""
    dialects = [Twin("one"), Twin("two")]
    schema = detect(TWIN, dialects=dialects)
    assert schema is not None
    assert _facts(validate(schema, TWIN, dialects=dialects)) == [("ambiguous", "proj")]


def test_sparse_tensors_are_a_problem_where_a_layer_needs_them() -> None:
    """A side tensor that is sparse can't be read, and is reported; a sparse tensor of no layer is no problem."""
    tensors = {**_trio(), "proj.absmax": torch.ones(12).to_sparse(), "other.weight": torch.eye(3).to_sparse()}
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(tensors)
    assert _facts(caught.value.problems) == [("value", "proj.absmax")]


def test_tensors_of_torchs_fake_mode_are_metadata() -> None:
    """Fake tensors have no numbers: they are judged like meta tensors."""
    mode = FakeTensorMode()
    tensors = {name: mode.from_tensor(tensor) for name, tensor in _trio().items()}
    assert list(detect_or_fail(tensors).layers) == ["proj"]


class Reader(Twin):
    """Reads a weight, or raises."""

    def __init__(self, result: q4.PackedWeight | Exception) -> None:
        super().__init__("reader")
        self.result = result

    def read(self, layer: q4.LayerSchema, load: Callable[[str], torch.Tensor]) -> q4.PackedWeight:
        """Return or raise the configured result."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_values_of_any_dialect_are_looked_at_as_a_weight() -> None:
    """A dialect that says nothing of numbers has them looked at by reading, where its tensors are at hand."""
    weight = q4.quantize(torch.ones(4, 64), "nf4")
    assert detect_or_fail(TWIN, dialects=[Reader(weight)]).layers
    weight.scale[2] = float("nan")
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(TWIN, dialects=[Reader(weight)])
    assert _facts(caught.value.problems) == [("value", "proj")]
    assert "nan at [2, 0]" in str(caught.value)
    bare = {"proj.twin": q4.TensorInfo(torch.uint8, (4,))}
    assert detect_or_fail(bare, dialects=[Reader(weight)], load=TWIN.__getitem__).layers


def test_a_dialect_that_fails_to_read_is_reported_once() -> None:
    """A plugin's own error while it reads is a warning that names dialect and layer, and no verdict on the tensors."""
    with pytest.warns(q4.Q4PluginWarning, match=r"'reader' raised ZeroDivisionError.* as it read 'proj'"):
        assert detect_or_fail(TWIN, dialects=[Reader(ZeroDivisionError())]).layers


def test_problems_compare_by_what_they_show() -> None:
    """Two problems of one NaN are equal, so that sets of problems can be compared."""
    first, second = (q4.Problem("value", "a", "finite", float("nan")) for _ in range(2))
    assert first == second
    assert first != q4.Problem("value", "a", "finite", 1.0)
    assert len({first, second}) == 1


def test_error_shows_twenty_problems_and_counts_the_rest() -> None:
    """However many layers are broken, the message stays short; ``problems`` has every one of them."""
    tensors = {f"m{index}.weight": torch.zeros(0, dtype=torch.uint8) for index in range(50)}
    tensors |= {f"m{index}.absmax": torch.zeros(0) for index in range(50)}
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(tensors)
    count = len(caught.value.problems)
    assert count > 50
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert f"{count} problems" in lines[0]
    assert lines[-1] == f"  … and {count - 20} more; the error's `problems` has all of them"
