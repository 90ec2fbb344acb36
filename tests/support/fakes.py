"""Backends and plugins for tests: right or wrong on purpose, with every fact adjustable."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNEL_PATH = q4.KernelPath("fake_gemm", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)


class FakeBackend:
    """A right kernel backend, computed through the reference codec; arguments replace any of its facts."""

    def __init__(
        self,
        name: str = "fake",
        *,
        paths: tuple[q4.KernelPath, ...] = (KERNEL_PATH,),
        reasons: tuple[q4.Reason, ...] = (),
        native_state: str = "fake: loaded",
        api_version: Any = (2, 0),
        damage: Any = None,
        exports: bool = True,
        prepare_error: Exception | None = None,
        check_error: Exception | None = None,
        **capabilities: Any,
    ) -> None:
        self.name = name
        self.api_version = api_version
        declared: dict[str, Any] = {
            "formats": frozenset(q4.BUILTIN_FORMATS),
            "scale_kinds": frozenset(q4.ScaleKind),
            "devices": {"cpu"},
            "dtypes": {torch.float32, torch.bfloat16},
            "precisions": frozenset(q4.Precision),
            "features": frozenset(q4.Feature),
        }
        self.capabilities = q4.Capabilities(**(declared | capabilities))
        self.paths, self.reasons, self.damage = paths, reasons, damage
        self.native_state = native_state
        self.prepare_error, self.check_error = prepare_error, check_error
        self.requests: list[q4.Request] = []
        self.calls: list[tuple[str, int]] = []
        if exports:
            self.export = self._export

    def check(self, request: q4.Request) -> q4.Support:
        """Answer as configured, and remember the request."""
        self.requests.append(request)
        if self.check_error is not None:
            raise self.check_error
        if self.reasons:
            return q4.Support.no(self.reasons, native_state="fake: missing")
        return q4.Support.yes(self.paths, native_state=self.native_state)

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Copy the tensors, or raise as configured."""
        if self.prepare_error is not None:
            raise self.prepare_error
        return q4.Prepared(tuple(tensor.clone() for _, tensor in weight.tensors()), q4.WeightSpec.of(weight))

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        """Compute through the codec, damaged as configured, and remember path and rows."""
        self.calls.append((path, x.shape[0]))
        dense = q4.dequantize(prepared.meta.build(prepared.tensors), torch.float32)
        y = x.to(torch.float32) @ dense.T
        if bias is not None:
            y = y + bias
        if self.damage is not None:
            y = self.damage(y)
        out.copy_(y)

    def _export(self, prepared: q4.Prepared, rows: torch.Tensor | None = None) -> q4.PackedWeight:
        weight: q4.PackedWeight = prepared.meta.build(prepared.tensors)
        return weight if rows is None else weight.take_rows(rows)


def plugin(*backends: Any, **hooks: Any) -> types.ModuleType:
    """Return a plugin module whose ``q4_backends`` gives these, with further hooks by name."""
    module = types.ModuleType("fake_plugin")

    @q4.hookimpl
    def q4_backends() -> list[Any]:
        return list(backends)

    module.q4_backends = q4_backends  # type: ignore[attr-defined]
    for name, function in hooks.items():
        setattr(module, name, q4.hookimpl(function))
    return module


def registry(*backends: Any, reference: bool = True) -> q4.Registry:
    """Return a registry with these backends; by default with the references, of products and of quantising."""
    plugins: list[tuple[str, object]] = [(f"plugin-{i}", plugin(backend)) for i, backend in enumerate(backends)]
    if reference:
        import q4_dequant_fallback  # noqa: PLC0415  # found like any plugin; named here for tests only
        import q4_quantize  # noqa: PLC0415  # as above

        plugins += [("dequant-fallback", q4_dequant_fallback), ("quantize", q4_quantize)]
    return q4.Registry(plugins)


@pytest.fixture
def reference_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out whatever kernels happen to be installed, so that the process's registry has the reference alone."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects,gguf,lm,nn,safetensors")
    q4.reset_registry()
    yield
    q4.reset_registry()
