"""``Q4Config``: options with which transformers loads a model."""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from transformers.utils.quantization_config import QuantizationConfigMixin

import q4core as q4
from q4core import ConfigError, SessionConfig, default_registry, find_format
from q4core.plugin_api import find_dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["METHOD", "Q4Config"]

METHOD = "q4"
"""transformers' name of this quantizer: one of its own would switch on code that is written for another library."""
_OPTIONS = (
    "format", "block_size", "zero_points", "modules_to_not_convert", "dialect", "lossy", "backend", "compute_path",
    "activation_precision", "cache", "skip", "programs",
)  # fmt: skip


class Q4Config(QuantizationConfigMixin):  # type: ignore[misc]  # transformers has no types here
    """Loading options; ``from_pretrained(…, quantization_config=Q4Config())`` takes a 4-bit checkpoint as it is stored.

    Args:
        format: Quantise the linear layers of a dense checkpoint in this format while it is loaded; None for a
            checkpoint that is 4-bit already.
        block_size: In-features per scale, with ``format``. Defaults to the format's own.
        zero_points: With ``format="int4"``: give each block a zero point. The error is less, but transformers can't
            load by compressed-tensors what is saved then.
        modules_to_not_convert: Names of modules that stay dense: whole, or their last parts. With ``format``, None
            leaves the output head and tied weights dense, as transformers' own quantizers do. Of a 4-bit checkpoint,
            these modules are dequantised.
        dialect: What ``save_pretrained`` writes. Defaults to the dialect that was read.
        lossy: Whether ``save_pretrained`` may round, or leave out, what that dialect can't express exactly.
        backend: As in ``q4core.SessionConfig``, like ``compute_path`` and ``activation_precision``.
        compute_path: See there.
        activation_precision: See there.
        cache: Where prepared layers are stored, as ``q4_lm.LanguageModel.open`` takes it: ``"auto"`` asks ``Q4_CACHE``
            (a folder, or ``off``) and else takes the user's cache folder; ``"off"`` has none; or a folder.
        skip: ``"unsupported"`` makes a layer that can't be quantised, or can't run packed in its module, dense instead
            of an error. Each is logged, and listed by ``explain`` with its reason.
        programs: Whether encoders and decoders run by programs on CPUs where these compute the same: one call for a
            batch or a token, in place of some two hundred modules. ``explain`` says which calls did.

    Raises:
        ConfigError, FormatError, DialectError: An option is not legal; the message names it.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        format: str | None = None,  # noqa: A002  # the name everywhere here
        *,
        block_size: int | None = None,
        zero_points: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
        dialect: str | None = None,
        lossy: bool = False,
        backend: str | None = None,
        compute_path: str | None = None,
        activation_precision: str | None = None,
        cache: str | PathLike[str] = "auto",
        skip: str | None = None,
        programs: bool = True,
        **others: Any,
    ) -> None:
        unknown = sorted(set(others) - {"quant_method"})
        if unknown:
            rule = f"one of {', '.join(_OPTIONS)}"
            raise ConfigError("Q4Config", name="option", rule=rule, value=unknown[0])
        if format is not None:
            legal = find_format(format, default_registry().formats().values()).block_sizes
            if block_size is not None and (
                not isinstance(block_size, int) or block_size not in (legal or {block_size})
            ):
                rule = f"one of {', '.join(map(str, sorted(legal)))}, as {format} has it" if legal else "an integer"
                raise ConfigError("Q4Config", name="block_size", rule=rule, value=block_size)
        elif block_size is not None:
            rule = "None without format=: a 4-bit checkpoint is taken as it is stored"
            raise ConfigError("Q4Config", name="block_size", rule=rule, value=block_size)
        if skip not in (None, "unsupported"):
            raise ConfigError("Q4Config", name="skip", rule="None or 'unsupported'", value=skip)
        if not isinstance(zero_points, bool) or (zero_points and format != "int4"):
            raise ConfigError("Q4Config", name="zero_points", rule="a bool; True with format='int4'", value=zero_points)
        names = None if modules_to_not_convert is None else list(modules_to_not_convert)
        if isinstance(modules_to_not_convert, str) or not all(isinstance(name, str) for name in names or ()):
            rule = "a list of names of modules"
            raise ConfigError("Q4Config", name="modules_to_not_convert", rule=rule, value=modules_to_not_convert)
        if dialect is not None:
            find_dialect(dialect, q4.dialects())
        self.quant_method = METHOD
        self.format, self.block_size, self.modules_to_not_convert = format, block_size, names
        self.zero_points, self.skip, self.programs = zero_points, skip, _require_bool("programs", programs)
        self.dialect, self.lossy, self.backend = dialect, bool(lossy), backend
        self.compute_path, self.activation_precision = compute_path, activation_precision
        if not isinstance(cache, (str, PathLike)) or not fspath(cache):
            raise ConfigError("Q4Config", name="cache", rule="'auto', 'off' or a folder", value=cache)
        self.cache = fspath(cache)
        self.stored: dict[str, Any] | None = None
        self.gguf: Any = None
        self.session_config()

    def session_config(self) -> SessionConfig:
        """Return what the layers are prepared under.

        Raises:
            ConfigError: An option is not legal.
        """
        given: Any = {name: getattr(self, name) for name in ("backend", "compute_path", "activation_precision")}
        return SessionConfig(**given)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002  # transformers' signature
        """Return the configuration of a dict: our own options, or none, where it is another library's entry."""
        own = config_dict if config_dict.get("quant_method") == METHOD else {}
        found = cls(**own, **{name: kwargs.pop(name) for name in _OPTIONS if name in kwargs})
        return (found, kwargs) if return_unused_kwargs else found

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` holds: the dialect's own entry once a model is loaded, so that others load it."""
        if self.stored is not None:
            return dict(self.stored)
        given = {name: getattr(self, name) for name in _OPTIONS}
        plain = {**dict.fromkeys(_OPTIONS, False), "programs": True}
        given = {name: value for name, value in given.items() if value is not None and value != plain[name]}
        return {"quant_method": METHOD, **given}


def _require_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("Q4Config", name=name, rule="a bool", value=value)
    return value
