"""The backend contract: the page and the code say the same; values refuse what can't be meant."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_programs import RunsPrograms
from q4_snn.products import RunsSpikes

PAGE = (Path(__file__).parents[2] / "docs" / "backend-api.md").read_text(encoding="utf-8")


VALUES = (
    q4.Capabilities,
    q4.KernelPath,
    q4.Prepared,
    q4.PrepareContext,
    q4.Request,
    q4.Segment,
    q4.Support,
)
KINDS = (q4.PathKind, q4.Precision)


@pytest.mark.parametrize("value", VALUES)
def test_the_page_names_every_field_of_the_contract(value: type[Any]) -> None:
    """What passes between the core and a backend is on the page, field by field; what is private is no contract."""
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", PAGE, re.DOTALL))
    names = [name for name in attrs.fields_dict(value) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_names_every_member_of_the_contract(kind: Any) -> None:
    """So are the words that a path is described by, and the tiers by their numbers."""
    assert [member.name for member in kind if f"`{member.name}`" not in PAGE] == []
    assert [tier for tier in q4.Tier if not re.search(rf"\b{int(tier)} ", PAGE)] == []


def _example() -> types.ModuleType:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = types.ModuleType("my_package")
    exec(code, vars(module))  # noqa: S102  # our own page
    return module


def test_the_example_of_the_page_runs() -> None:
    """The code at the top of the page is a plugin that the registry takes, with every method of the contract."""
    backends = q4.Registry([("my-backend", _example())]).backends()
    assert list(backends) == ["my-backend"]
    assert isinstance(backends["my-backend"], q4.Backend)


def test_a_context_allocates_on_its_device() -> None:
    """A context is made from a device, which it keeps to itself: a backend allocates by ``empty`` and ``keep``."""
    context = q4.PrepareContext("meta")
    assert context.empty((2, 3), torch.float16).device.type == "meta"
    assert context.keep(torch.zeros(4)).device.type == "meta"
    assert [name for name in dir(context) if not name.startswith("_")] == ["empty", "gradient_paths", "keep", "paths"]


def _shape(method: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each argument."""
    return [(item.name, item.kind, item.default) for item in inspect.signature(method).parameters.values()]


def _promised(text: str) -> dict[str, list[tuple[str, Any, Any]]]:
    """Return the signatures that a text writes as ``name(arguments) -> result``."""
    found = {}
    for name, arguments in re.findall(r"`(\w+)\(([^()`]*)\) -> ", text):
        space: dict[str, Any] = {"Rounding": q4.Rounding}
        exec(f"def {name}({arguments}): ...", space)  # noqa: S102  # our own text
        found[name] = _shape(space[name])
    return found


OPTIONAL = _promised(str(q4.Backend.__doc__))
METHODS = OPTIONAL | {
    name: _shape(getattr(q4.Backend, name))[1:] for name in ("check", "prepare", "linear")
}  # without ``self``


def test_the_protocol_has_every_optional_method() -> None:
    """The protocol writes the signature of each method that the registry asks for, and of those of what is stored."""
    asked = {"quantize", "input_gradient", "bind_program", "spikes", "spike_limit"}
    assert OPTIONAL.keys() == asked | {"export", "describe", "meta_from"}
    protocols = (RunsPrograms, "bind_program"), (RunsSpikes, "spikes"), (RunsSpikes, "spike_limit")
    assert [name for kind, name in protocols if _shape(getattr(kind, name))[1:] != OPTIONAL[name]] == []


@pytest.mark.parametrize("name", METHODS)
def test_backends_have_the_signatures_of_the_protocol(name: str) -> None:
    """Each installed backend takes a method's arguments by the names, kinds and defaults that the protocol writes."""
    plugins = [item for item in q4.Registry().backends().values() if callable(getattr(item, name, None))]
    assert plugins
    assert [item.name for item in plugins if _shape(getattr(item, name)) != METHODS[name]] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_page_shows_each_methods_arguments(name: str) -> None:
    """docs/backend-api.md writes each method as the protocol does: in a heading, and in its example."""
    headings = "\n".join(re.findall(r"^## .*", PAGE, re.MULTILINE))
    assert _promised(headings)[name] == METHODS[name]
    assert _shape(getattr(_example().MyBackend(), name)) == METHODS[name]


def test_the_page_lists_every_feature_and_reason() -> None:
    """A feature or reason code that the page does not know can't be declared by its readers."""
    assert [feature.name for feature in q4.Feature if f"`{feature.name}`" not in PAGE] == []
    assert [code.value for code in q4.ReasonCode if f"`{code.value}`" not in PAGE] == []


def test_every_reason_code_has_its_domain() -> None:
    """A reason is about hardware, build, scheme or policy, so that a choice never reads as a fault of the machine."""
    assert {code.domain for code in q4.ReasonCode} == {"hardware", "build", "scheme", "policy"}
    assert q4.ReasonCode.POLICY.domain == "policy"
    assert q4.ReasonCode.ARCH.domain == "hardware"


@pytest.mark.parametrize("m", [(0, 1), (2, 1), (-1, None)])
def test_an_empty_range_of_m_is_refused(m: tuple[int, int | None]) -> None:
    """Paths and requests need a range of at least one row."""
    with pytest.raises(q4.ConfigError):
        q4.KernelPath("p", m, q4.PathKind.KERNEL, q4.Precision.W4A32, 0)
    with pytest.raises(q4.ConfigError):
        q4.Request.for_weight(q4.quantize(torch.randn(4, 64), "nf4"), m=m)


@pytest.mark.parametrize(
    "rows", [tuple(range(9, 18)), (8,), (101,), (20, 20), (True,), (9.0,), ("9",), ([9],), 9, None, (0,), (10**6,)]
)
def test_probe_rows_that_are_not_legal_are_refused(rows: Any) -> None:
    """At most 8 different whole numbers, inside the path's range and not beyond 4,096."""
    high = None if rows == (10**6,) else 100
    with pytest.raises(q4.ConfigError, match="probe_rows"):
        q4.KernelPath("p", (9, high), q4.PathKind.KERNEL, q4.Precision.W4A32, 0, probe_rows=rows)


def test_probe_rows_are_part_of_a_path() -> None:
    """They may be given in any order and as any sequence; there are none by default."""
    facts = ("p", (9, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 0)
    assert q4.KernelPath(*facts).probe_rows == ()
    assert q4.KernelPath(*facts, probe_rows=[600, 17]).probe_rows == (17, 600)


def test_a_verdict_offers_or_refuses() -> None:
    """A verdict with neither paths nor reasons, or with both, says nothing."""
    reason = q4.Reason(q4.ReasonCode.ARCH, "no")
    path = q4.KernelPath("p", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 0)
    for paths, reasons in (((), ()), ((path,), (reason,))):
        with pytest.raises(q4.ConfigError):
            q4.Support("state", paths, reasons)


def test_a_request_knows_what_its_weight_needs() -> None:
    """Features of the weight and of the call come together in ``needs``."""
    weight = q4.quantize(torch.randn(4, 64), "q4_1")
    request = q4.Request.for_weight(weight, gradients=True)
    assert request.needs == {q4.Feature.OFFSET, q4.Feature.GRADIENTS}
    assert request.dtype == request.out_dtype == torch.float32


_P, _W = q4.ActivationPrecision, q4.Precision
EXACT = {_W.W4A32, _W.W4A16}
ALLOWED = [
    (_P.AUTO, "cpu", False, {*EXACT, _W.W4I16}),
    (_P.AUTO, "cpu", True, EXACT),
    (_P.AUTO, "cuda:0", False, EXACT),
    (_P.EXACT, "cpu", False, EXACT),
    (_P.INT16, "cpu", False, {_W.W4I16}),
    (_P.INT8, "cuda:0", True, {_W.W4A8}),
    (_P.FP4, "cpu", False, {_W.W4A4}),
]


@pytest.mark.parametrize(("wish", "device", "gradients", "allowed"), ALLOWED)
def test_a_request_says_which_precisions_it_allows(
    wish: q4.ActivationPrecision, device: str, gradients: bool, allowed: set[q4.Precision]
) -> None:
    """What AUTO means is the core's answer, the same for every backend: int16 activations on CPUs, unless training."""
    weight = q4.quantize(torch.randn(4, 64), "nf4")
    request = q4.Request.for_weight(weight, device=device, precision=wish, gradients=gradients)
    assert {precision for precision in q4.Precision if request.allows(precision)} == allowed


def test_the_dtypes_of_a_manifest_are_those_of_x_and_y() -> None:
    """A dtype that is not declared is refused for y as for x; a manifest has no second list that could differ."""
    manifest = q4.Capabilities(
        formats={q4.EVERY_FORMAT},
        scale_kinds={q4.ScaleKind.PLAIN},
        devices={"cpu"},
        dtypes={torch.float32, torch.bfloat16},
        precisions={q4.Precision.W4A32},
    )
    weight = q4.quantize(torch.randn(4, 64), "nf4")
    mixed = q4.Request.for_weight(weight, dtype=torch.float32, out_dtype=torch.bfloat16)
    assert manifest.refusals(mixed) == ()
    (reason,) = manifest.refusals(attrs.evolve(mixed, out_dtype=torch.float16))
    assert reason == q4.Reason(q4.ReasonCode.DTYPE, "dtype torch.float16 of y is not declared")
    assert "out_dtypes" not in attrs.fields_dict(q4.Capabilities)


def test_a_refusal_names_features_in_words() -> None:
    """Whoever reads why a layer has no kernel need not know the identifiers of manifests."""
    manifest = q4.Capabilities(
        formats={"nf4"},
        scale_kinds={q4.ScaleKind.PLAIN},
        devices={"cpu"},
        dtypes={torch.float32},
        precisions={q4.Precision.W4A32},
    )
    request = q4.Request.for_weight(q4.quantize(torch.randn(4, 96), "nf4"), gradients=True)
    assert [str(reason) for reason in manifest.refusals(request)] == [
        "feature: feature 'blocks that run across rows' is not declared",
        "feature: feature 'gradients' is not declared",
    ]


@pytest.mark.parametrize("beyond", [torch.float64, torch.float8_e4m3fn, torch.int8, "float32"])
def test_a_manifest_declares_no_dtype_whose_results_nobody_can_judge(beyond: torch.dtype) -> None:
    """Else the first request for it would end in the self-probe, by an error of no type of ours."""
    with pytest.raises(q4.ConfigError, match=rf"dtypes.*float32, torch.bfloat16, torch.float16.*{beyond}"):
        q4.Capabilities(
            formats={"nf4"},
            scale_kinds={q4.ScaleKind.PLAIN},
            devices={"cpu"},
            dtypes={torch.float32, beyond},
            precisions={q4.Precision.W4A32},
        )
