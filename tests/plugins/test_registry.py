"""The registry: one plugin's fault never costs another's answers, and every fault is recorded."""

from __future__ import annotations

import json
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

import q4core as q4
from q4core.plugin_api import emit, names_of_plugins
from tests.support.events import forget_warnings
from tests.support.fakes import FakeBackend, plugin
from tests.support.interpreter import run_interpreter


def _nothing() -> list[Any]:
    return []


def _records(registry: q4.Registry) -> dict[str, q4.PluginRecord]:
    return {record.name: record for record in registry.records()}


def test_a_hook_that_raises_costs_only_its_own_plugin() -> None:
    """One plugin's hook raises; the other plugin's backend is still there, and the fault is recorded."""

    def raising() -> list[Any]:
        raise RuntimeError("boom")

    broken = types.ModuleType("broken")
    broken.q4_backends = q4.hookimpl(raising)  # type: ignore[attr-defined]
    broken.q4_backends.__name__ = "q4_backends"
    registry = q4.Registry([("broken", broken), ("good", plugin(FakeBackend("good")))])
    with pytest.warns(q4.Q4PluginWarning, match="boom"):
        assert list(registry.backends()) == ["good"]
    assert "RuntimeError: boom" in _records(registry)["broken"].errors[0]
    assert _records(registry)["good"].errors == []


def test_a_plugin_whose_hooks_are_not_marked_is_reported() -> None:
    """Without @q4core.hookimpl nothing is ever called: each name of a hook that is not marked is reported."""
    module = types.ModuleType("forgetful")
    module.q4_backends = lambda: [FakeBackend("never")]  # type: ignore[attr-defined]
    module.q4_formats = _nothing  # type: ignore[attr-defined]
    registry = q4.Registry([("forgetful", module)])
    told = "not marked with @q4core.hookimpl, and so never called: q4_backends, q4_formats"
    with pytest.warns(q4.Q4PluginWarning, match=told):
        assert registry.backends() == {}
    assert _records(registry)["forgetful"].errors == [told]
    half = plugin(FakeBackend("good"))
    half.q4_formats = _nothing  # type: ignore[attr-defined]
    registry = q4.Registry([("half", half)])
    with pytest.warns(q4.Q4PluginWarning, match="@q4core.hookimpl, and so never called: q4_formats$"):
        assert list(registry.backends()) == ["good"]


def test_a_plugin_without_any_hook_is_reported() -> None:
    """A module that implements no hook brings nothing, which is no state to call loaded and leave at that."""
    registry = q4.Registry([("empty", types.ModuleType("empty"))])
    with pytest.warns(q4.Q4PluginWarning, match="brings no hook.*q4_backends"):
        assert registry.backends() == {}
    (record,) = registry.records()
    assert record.state == "loaded"
    assert "@q4core.hookimpl" in record.errors[0]


@pytest.mark.parametrize("version", [(3, 0), (2, 1), (1, 99), (0, 9), "2.0", None, (2,), ([2], 0)])
def test_a_wrong_api_version_is_refused_and_reported(version: object) -> None:
    """A backend of another API version is not used, and is among the rejections with its reason."""
    registry = q4.Registry([("a", plugin(FakeBackend("old", api_version=version), FakeBackend("good")))])
    with pytest.warns(q4.Q4PluginWarning, match="api_version"):
        assert list(registry.backends()) == ["good"]
    (refused,) = registry.invalid_backends()
    assert (refused.name, refused.reason.code) == ("old", q4.ReasonCode.API_VERSION)


def test_a_duplicate_backend_name_disables_all_of_that_name() -> None:
    """Two backends of one name: neither is used, whatever the order, and both plugins are reported."""
    pairs = [("a", plugin(FakeBackend("twin"))), ("b", plugin(FakeBackend("twin"), FakeBackend("other")))]
    for order in (pairs, pairs[::-1]):
        forget_warnings()
        registry = q4.Registry(order)
        with pytest.warns(q4.Q4PluginWarning, match="duplicate"):
            assert list(registry.backends()) == ["other"]
        assert {item.plugin for item in registry.invalid_backends()} == {"a", "b"}


def test_a_duplicate_plugin_name_is_recorded() -> None:
    """A second plugin of one name is left out and recorded."""
    registry = q4.Registry([("a", plugin(FakeBackend("one"))), ("a", plugin(FakeBackend("two")))])
    with pytest.warns(q4.Q4PluginWarning, match="second plugin"):
        assert list(registry.backends()) == ["one"]
    assert "second plugin" in _records(registry)["a"].errors[0]


def test_an_unknown_hook_is_reported() -> None:
    """A misspelt hook is reported, with the hooks there are."""
    module = plugin(FakeBackend(), q4_backendz=_nothing)
    registry = q4.Registry([("a", module)])
    with pytest.warns(q4.Q4PluginWarning, match="unknown hook 'q4_backendz'"):
        records = _records(registry)
    assert "q4_backends" in records["a"].errors[0]


@pytest.mark.parametrize("item", ["text", 3, None, object(), types.SimpleNamespace(name="", api_version=(2, 0))])
def test_what_is_no_backend_is_refused(item: object) -> None:
    """Anything that is no backend becomes a record, never a crash."""
    registry = q4.Registry([("a", plugin(item, FakeBackend("good")))])
    with pytest.warns(q4.Q4PluginWarning):
        assert list(registry.backends()) == ["good"]


def test_a_backend_without_its_methods_is_refused() -> None:
    """The record names the methods that are missing."""
    backend = FakeBackend("half")
    half = types.SimpleNamespace(
        name="half", api_version=(2, 0), capabilities=backend.capabilities, check=backend.check
    )
    registry = q4.Registry([("a", plugin(half))])
    with pytest.warns(q4.Q4PluginWarning, match="prepare, linear"):
        assert registry.backends() == {}


def test_quantize_must_exist_where_it_is_declared() -> None:
    """A manifest that declares op quantize needs the method."""
    registry = q4.Registry([("a", plugin(FakeBackend("q", ops={"linear", "quantize"})))])
    with pytest.warns(q4.Q4PluginWarning, match="quantize"):
        assert registry.backends() == {}


def test_a_plugin_format_may_not_take_a_built_in_name() -> None:
    """A plugin can add a format, but never replace one."""
    mine = q4.Format("mine", q4.Form.CODEBOOK, 4, 32, tuple(range(16)))
    false = q4.Format("nf4", q4.Form.CODEBOOK, 4, 32, tuple(range(16)))
    module = plugin()
    module.q4_formats = q4.hookimpl(lambda: [mine, false])  # type: ignore[attr-defined]
    registry = q4.Registry([("a", module)])
    with pytest.warns(q4.Q4PluginWarning, match="duplicate name 'nf4'"):
        formats = registry.formats()
    assert formats["mine"] is mine
    assert formats["nf4"] is q4.BUILTIN_FORMATS["nf4"]


def test_observers_see_events_and_a_raising_one_is_recorded() -> None:
    """A plugin's q4_event hook sees each event; one that raises is recorded and stops nothing."""
    seen: list[str] = []

    def watch(event: str, fields: dict[str, Any]) -> None:
        seen.append(event)
        if event == "q4.probe":
            raise ValueError("tired")

    watch.__name__ = "q4_event"
    registry = q4.Registry([("a", plugin(FakeBackend("watched"), q4_event=watch))])
    import torch  # noqa: PLC0415  # only this test needs it

    with pytest.warns(q4.Q4PluginWarning, match="tired"):
        q4.Session(registry=registry).linear(q4.quantize(torch.randn(32, 64), "nf4"))
    assert {"q4.prepare", "q4.probe", "q4.select"} <= set(seen)
    assert "ValueError: tired" in _records(registry)["a"].errors[0]


def _run(code: str, tmp_path: Path, **environment: str) -> str:
    for name, text in {
        "q4_test_broken": "raise ImportError('no such library')",
        "q4_test_exits": "raise SystemExit(3)",
        "q4_test_good": "from tests.support.fakes import FakeBackend\nimport q4core as q4\n"
        "@q4.hookimpl\ndef q4_backends():\n    return [FakeBackend('good')]\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **environment}
    done = run_interpreter(["-W", "ignore", "-c", code], env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BACKENDS = "import q4core as q4; print(','.join(q4.default_registry().backends()))"


def test_modules_from_the_environment_are_loaded_next_to_broken_ones(tmp_path: Path) -> None:
    """Q4_PLUGIN_MODULES loads source trees; one that raises or exits at import is a record."""
    modules = "q4_test_broken,q4_test_exits,q4_test_good,q4_test_absent"
    assert _run(BACKENDS, tmp_path, Q4_PLUGINS="gguf", Q4_PLUGIN_MODULES=modules) == "dequant-fallback,good"
    states = _run(
        "import q4core as q4; print([(r.name, r.state) for r in q4.default_registry().records() if 'test' in r.name])",
        tmp_path,
        Q4_PLUGIN_MODULES=modules,
    )
    assert states == str(
        [
            ("q4_test_absent", "failed"),
            ("q4_test_broken", "failed"),
            ("q4_test_exits", "failed"),
            ("q4_test_good", "loaded"),
        ]
    )


BASE_FAULTS = {
    "own": "class Bare(BaseException): pass\nraise Bare('boom')",
    "cancelled": "import asyncio\nraise asyncio.CancelledError('boom')",
    "generator": "raise GeneratorExit('boom')",
    "outcome": "import pytest\npytest.skip('boom', allow_module_level=True)",
    "exit": "raise SystemExit('boom')",
}


@pytest.mark.parametrize("where", ["import", "q4_backends", "q4_event"])
@pytest.mark.parametrize("kind", BASE_FAULTS)
@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_a_base_exception_is_recorded_like_any_error(
    kind: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What derives from BaseException alone, at import or in a hook, costs only its own plugin."""
    name = f"q4_test_base_{kind}_{where}"
    body = textwrap.indent(BASE_FAULTS[kind], "    ")
    arguments = "event, fields" if where == "q4_event" else ""
    text = f"import q4core\n@q4core.hookimpl\ndef {where}({arguments}):\n{body}\n"
    (tmp_path / f"{name}.py").write_text(BASE_FAULTS[kind] if where == "import" else text)
    monkeypatch.syspath_prepend(tmp_path)
    registry = q4.Registry(environment={"Q4_PLUGINS": "dequant-fallback", "Q4_PLUGIN_MODULES": name})
    assert "dequant-fallback" in registry.backends()
    emit("q4.one")
    (error,) = _records(registry)[name].errors
    assert where in error
    assert "boom" in error


def test_the_users_own_interrupt_comes_through() -> None:
    """Ctrl-C while a plugin is asked is not the plugin's fault, and ends what was asked."""

    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    registry = q4.Registry([("a", plugin(q4_dialects=interrupted))])
    with pytest.raises(KeyboardInterrupt, match="in hook q4_dialects of plugin 'a'"):  # who raised it, or was asked
        registry.dialects()


def test_names_of_plugins_are_those_that_the_variables_let_in() -> None:
    """Nothing is loaded for it; a module that is named is let in whatever the allow list says."""
    names = names_of_plugins(
        {"Q4_PLUGINS": "gguf", "Q4_PLUGIN_MODULES": "q4_no_such", "Q4_DISABLE_PLUGINS": "quantize"}
    )
    assert names == ("dequant-fallback", "gguf", "q4_no_such")


def test_a_failed_plugin_is_among_the_rejections(tmp_path: Path) -> None:
    """The import error of a plugin is a reason that the user sees when nothing may serve."""
    code = (
        "import q4core as q4, torch\n"
        "w = q4.quantize(torch.randn(8, 64), 'nf4')\n"
        "try:\n    q4.Session(q4.SessionConfig(compute_path='kernel_only')).linear(w)\n"
        "except q4.BackendUnavailableError as error:\n"
        "    print([(r.backend, r.reasons[0].code.value) for r in error.rejections])"
    )
    told = _run(code, tmp_path, Q4_PLUGINS="gguf", Q4_PLUGIN_MODULES="q4_test_broken")
    assert told == str([("dequant-fallback", "policy"), ("q4_test_broken", "plugin_error")])


def _loaded(tmp_path: Path, *settings: dict[str, str]) -> list[list[str]]:
    """Return which plugins are loaded under each of some settings, one after another in a process."""
    code = f"""
        import json, os, q4core as q4
        for variables in {settings!r}:
            os.environ.update(variables)
            q4.reset_registry()
            print(json.dumps([r.name for r in q4.default_registry().records() if r.state == 'loaded']))
            for name in variables:
                del os.environ[name]
    """
    return [json.loads(line) for line in _run(textwrap.dedent(code), tmp_path).splitlines()]


def test_allow_list_keeps_the_references(tmp_path: Path) -> None:
    """Q4_PLUGINS allows just the named plugins and the references; Q4_DISABLE_PLUGINS leaves one out."""
    disabled = {"Q4_DISABLE_PLUGINS": "dequant-fallback"}
    settings: list[dict[str, str]] = [{"Q4_PLUGINS": "gguf"}, {"Q4_DISABLE_PLUGINS": "gguf"}]
    allowed, left, neither = _loaded(tmp_path, *settings, {"Q4_PLUGINS": "gguf", **disabled})
    assert allowed == ["dequant-fallback", "gguf", "quantize"]
    assert "dequant-fallback" in left
    assert "gguf" not in left
    assert neither == ["gguf", "quantize"]


def test_an_allow_list_without_names_is_none(tmp_path: Path) -> None:
    """Q4_PLUGINS that is empty, or blank, leaves every plugin in, as if it were not there."""
    everything, *others = _loaded(tmp_path, {}, *({"Q4_PLUGINS": value} for value in ("", " ", ",")))
    assert "gguf" in everything
    assert others == [everything] * 3


@pytest.mark.parametrize("variable", ["Q4_PLUGINS", "Q4_DISABLE_PLUGINS"])
@pytest.mark.parametrize(("wrong", "closest"), [("dialectz", "dialects"), ("Quite-Other", None)])
def test_names_that_fit_no_plugin_are_reported(variable: str, wrong: str, closest: str | None) -> None:
    """A name in the environment that fits nothing is a record and one warning, with the closest name there is."""
    plugins = [("dialects", plugin()), ("gguf", plugin())]
    registry = q4.Registry(plugins, environment={variable: f"gguf, {wrong}"})
    with pytest.warns(q4.Q4PluginWarning) as caught:
        records = {record.name: record for record in registry.records()}
    assert len(caught) == 1
    assert records[wrong].state == "unknown"
    assert records[wrong].source == variable
    (error,) = records[wrong].errors
    assert variable in error
    assert ("did you mean 'dialects'" in error) == (closest is not None)
    assert error in str(caught[0].message)
    assert records["gguf"].state == ("loaded" if variable == "Q4_PLUGINS" else "disabled")
    assert registry.invalid_backends() == ()


def test_the_processs_variables_are_not_held_against_given_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test gives its plugins, names of installed ones in the process's own variables are no typos."""
    monkeypatch.setenv("Q4_PLUGINS", "gguf,nn")
    assert [record.name for record in q4.Registry([("gguf", plugin())]).records()] == ["gguf"]


def test_a_name_that_both_variables_have_wrong_is_reported_for_each() -> None:
    """One record holds what is wrong with a name in Q4_PLUGINS and in Q4_DISABLE_PLUGINS."""
    variables = {"Q4_PLUGINS": "x,x", "Q4_DISABLE_PLUGINS": "x"}
    registry = q4.Registry([("gguf", plugin())], environment=variables)
    with pytest.warns(q4.Q4PluginWarning):
        (record,) = [item for item in registry.records() if item.name == "x"]
    assert len(record.errors) == 2
    assert "Q4_PLUGINS" in record.errors[0]
    assert "Q4_DISABLE_PLUGINS" in record.errors[1]


def test_modules_and_the_reference_may_be_named() -> None:
    """Names of plugins that are there, of modules, and of the reference are right in either variable."""
    variables = {
        "Q4_PLUGINS": "dequant-fallback,nn,q4_gguf",
        "Q4_PLUGIN_MODULES": "q4_gguf",
        "Q4_DISABLE_PLUGINS": "dialects",
    }
    registry = q4.Registry(environment=variables)
    assert [record.name for record in registry.records() if record.errors] == []
