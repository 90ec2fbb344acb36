"""The parts of a sentence-transformers folder: pooling, dense layers, lengths and prompts, each checked.

Reference:
    ``modules.json`` and the files next to it as sentence-transformers 2 to 6 write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from torch import nn

import q4core as q4
from q4_lm.generation.encoding import POOLED
from q4_lm.models.read_json import read_json
from q4core.plugin_api import open_regular, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["SentenceModules", "modules_of_file", "read_modules"]

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older files' flags, in the order in which the vectors of several are joined."""
_ACTIVATIONS = ("ELU", "GELU", "Identity", "LeakyReLU", "Mish", "ReLU", "SELU", "SiLU", "Sigmoid", "Softplus", "Tanh")
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


def _weighted_mean(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask * torch.arange(1, features.shape[1] + 1, device=mask.device)[None, :, None]
    return (features * weights).sum(1) / weights.sum(1)


def _last(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = mask[..., 0].sum(1).to(torch.int64) - 1
    return features[torch.arange(len(features), device=features.device), places]


_POOLINGS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda features, _: features[:, 0],
    "max": lambda features, mask: features.masked_fill(mask == 0, -torch.inf).amax(1),
    "mean": lambda features, mask: (features * mask).sum(1) / mask.sum(1),
    "mean_sqrt_len_tokens": lambda features, mask: (features * mask).sum(1) / mask.sum(1).sqrt(),
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""Mode → one vector of a sentence's features [n, T, hidden] and the mask of its tokens [n, T, 1], as floats."""


class _Normalize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


@attrs.frozen(eq=False)
class SentenceModules:
    """A folder's steps from a sentence to one vector.

    Args:
        encoder: The folder of the encoder and its tokenizer.
        pooling: Modes of pooling; the vectors of several are joined.
        head: The parts after pooling, in evaluation mode: linear layers with their activations, and scaling to length
            one.
        limit: Tokens of a sentence at most by the folder's files; None where they do not say.
        lower_case: Whether texts are written in lower case first.
        prompts: Text before a sentence by the prompt's name.
        default_prompt: Name of the prompt that is used unless another is named, or None.
    """

    encoder: Path
    pooling: tuple[str, ...]
    head: nn.Sequential
    limit: int | None
    lower_case: bool
    prompts: Mapping[str, str]
    default_prompt: str | None

    @property
    def pools_in_program(self) -> bool:
        """Whether a program may make the vectors: every mode of pooling is an operation of one."""
        return POOLED.issuperset(self.pooling)

    @property
    def is_normalised(self) -> bool:
        """Whether the first part of the head scales vectors to length one."""
        return len(self.head) > 0 and isinstance(self.head[0], _Normalize)

    def finish(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the vectors that the parts make of what a program gave: pooled, and normalised where that is first."""
        for layer in [*self.head][1 if self.is_normalised else 0 :]:
            pooled = layer(pooled)
        return pooled

    def pool(self, features: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Return a vector for each sentence of features [n, T, hidden], of which ``allowed`` [n, T] are its tokens'."""
        mask = allowed[..., None].to(features.dtype)
        found: torch.Tensor = self.head(torch.cat([_POOLINGS[mode](features, mask) for mode in self.pooling], dim=-1))
        return found


def _fail(path: Path, name: str, rule: str, value: object = None, hint: str | None = None) -> NoReturn:
    facts = {} if value is None else {"value": value}
    raise q4.CheckpointError("sentence encoder", name=name, rule=rule, where=str(path), hint=hint, **facts)


def read_modules(folder: Path) -> SentenceModules:
    """Return the parts of a folder; without ``modules.json``, pooling by ``1_Pooling`` or the mean, and length one.

    Raises:
        CheckpointError: A file is missing or malformed, or a part is not computed here; it names both.
    """
    index = folder / "modules.json"
    encoder, parts = folder, [("Normalize", folder)]
    pooling = read_json(folder / "1_Pooling" / "config.json")
    at = folder / "1_Pooling" / "config.json"
    if index.is_file():
        (kind, encoder), *parts = _listed(index)
        if kind != "Transformer" or not parts or parts[0][0] != "Pooling":
            found = ", ".join([kind, *(name for name, _ in parts)])
            _fail(index, "parts", "a Transformer, a Pooling, then Dense and Normalize", found)
        at = parts.pop(0)[1] / "config.json"
        pooling = read_json(at)
        if not pooling:
            _fail(at, "file", "present")
    limit, lower_case = _text_options(encoder)
    prompts, default_prompt = _prompts(folder / "config_sentence_transformers.json")
    head = nn.Sequential()
    for kind, path in parts:
        if kind not in {"Dense", "Normalize"}:
            _fail(index, "parts", "a Transformer, a Pooling, then Dense and Normalize", kind)
        config = read_json(path / "config.json") if path != folder else {}
        _require_sentence_in_and_out(config, path / "config.json")
        head.extend(_dense(config, path) if kind == "Dense" else [_Normalize()])
    return SentenceModules(
        encoder=encoder,
        pooling=_pooling(pooling, at),
        head=head.eval().requires_grad_(requires_grad=False),
        limit=limit,
        lower_case=lower_case,
        prompts=prompts,
        default_prompt=default_prompt,
    )


def modules_of_file(path: Path, pooling: str) -> SentenceModules:
    """Return the parts of a GGUF file: vectors have length one, as no part says otherwise."""
    return SentenceModules(path, (pooling,), nn.Sequential(_Normalize()).eval(), None, False, {}, None)  # noqa: FBT003  # as the fields


def _listed(index: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each part of ``modules.json``; a kind of other packages is named whole."""
    with open_regular(index) as file:
        parts = parse_json(file.read(), what="modules.json", where=str(index))
    if not isinstance(parts, list) or not parts or not all(isinstance(item, dict) for item in parts):
        _fail(index, "JSON", "a list of objects, at least one", type(parts).__name__)
    found = []
    for item in parts:
        kind, path = item.get("type"), item.get("path")
        if not isinstance(kind, str):
            _fail(index, "type", "a text", kind)
        if not isinstance(path, str) or "\0" in path or path.startswith("/") or ".." in path.split("/"):
            _fail(index, "path", "a folder inside this one", path)
        name = kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind
        found.append((name, index.parent / path))
    return found


def _pooling(config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the modes of a pooling's file; the mean where it says nothing."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    chosen = [modes] if isinstance(modes, str) else modes
    unknown = [name for name in config if name.startswith("pooling_mode_") and name not in _FLAGS and config[name]]
    if unknown or not isinstance(chosen, list) or not chosen or any(mode not in [*_POOLINGS] for mode in chosen):
        _fail(path, "pooling_mode", f"among {', '.join(_POOLINGS)}", unknown or modes)
    if config.get("include_prompt", True) is not True:
        _fail(path, "include_prompt", "true; prompts left out of the mean are not computed", config["include_prompt"])
    return tuple(chosen)


def _require_sentence_in_and_out(config: Mapping[str, Any], path: Path) -> None:
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in {None, "sentence_embedding"}:
            _fail(path, name, "'sentence_embedding'; nothing else is computed", config[name])


def _dense(config: Mapping[str, Any], folder: Path) -> list[nn.Module]:
    """Return the linear layer of a ``Dense`` part and its activation."""
    path = folder / "config.json"
    if config.get("use_residual", False) is not False:
        _fail(path, "use_residual", "false; the residual is not computed", config["use_residual"])
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = "Identity" if named is None else str(named).rpartition(".")[2]
    if activation not in _ACTIVATIONS or not (named is None or str(named).startswith("torch.nn.")):
        _fail(path, "activation_function", f"one of torch.nn's {', '.join(_ACTIVATIONS)}", named)
    with q4.open(folder) as checkpoint:
        stored = {name: checkpoint.dense[name].to(torch.float32).clone() for name in checkpoint.dense}
    sizes = (config.get("out_features"), config.get("in_features"))
    expected: dict[str, tuple[Any, ...]] = {"linear.weight": sizes}
    if config.get("bias", True):
        expected["linear.bias"] = sizes[:1]
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if shapes != expected:
        _fail(folder, ", ".join(expected), f"of the shapes {[*expected.values()]}, by its config.json", shapes)
    rows, columns = shapes["linear.weight"]
    with torch.device("meta"):
        linear = nn.Linear(columns, rows, bias="linear.bias" in expected)
    linear.load_state_dict({name.removeprefix("linear."): item for name, item in stored.items()}, assign=True)
    return [linear, getattr(nn, activation)()]


def _text_options(folder: Path) -> tuple[int | None, bool]:
    """Return a text's most tokens, or None, and whether it is written in lower case."""
    path = folder / "sentence_bert_config.json"
    config, tokenizer = read_json(path), read_json(folder / "tokenizer_config.json")
    text = config.get("modality_config", {"text": _TEXT})
    for name, is_legal, rule in (
        ("transformer_task", config.get("transformer_task") in {None, "feature-extraction"}, "'feature-extraction'"),
        ("module_output_name", config.get("module_output_name") in {None, "token_embeddings"}, "'token_embeddings'"),
        ("modality_config", isinstance(text, dict) and text.get("text") == _TEXT, "the last hidden state of texts"),
        ("do_lower_case", isinstance(config.get("do_lower_case"), (bool, type(None))), "true or false"),
    ):
        if not is_legal:
            _fail(path, name, rule, config[name])
    if tokenizer.get("truncation_side", "right") != "right":
        where = folder / "tokenizer_config.json"
        _fail(where, "truncation_side", "'right', where texts are cut", tokenizer["truncation_side"])
    limit = config.get("max_seq_length")
    if limit is None:  # the library's newer releases store it there; transformers stores 10^30 for no limit
        limit, path = tokenizer.get("model_max_length"), folder / "tokenizer_config.json"
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 1):
        _fail(path, "max_seq_length", "a positive number of tokens", limit)
    return None if limit is None else int(limit), bool(config.get("do_lower_case"))


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the default one's name."""
    config = read_json(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, (str, type(None))) for text in prompts.values()):
        _fail(path, "prompts", "an object of texts", prompts)
    if default is not None and default not in prompts:
        _fail(path, "default_prompt_name", f"one of its prompts ({', '.join(prompts) or 'none'})", default)
    return {name: text or "" for name, text in prompts.items()}, default
