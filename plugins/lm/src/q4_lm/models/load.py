"""Loading of an opened checkpoint's tensors into a model that was built without any.

Each tensor is requested with its shape. One that was never requested is an error: the model would lack a part.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from torch import nn

from q4_nn.blocks.embedding import PackedEmbedding
from q4_nn.blocks.place import Part, place_linears_
from q4core import CheckpointError, PackedWeight, resolve_config
from q4core.plugin_api import resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4_lm.models.transformer import TransformerDecoder, TransformerEncoder
    from q4core import Checkpoint, Session

__all__ = ["Names", "load_weights_", "loading_watched"]

_watch: contextvars.ContextVar[Callable[[int, int], None]] = contextvars.ContextVar(
    "q4_lm_loading", default=lambda _done, _total: None
)

_NAMED = 5
"""So many tensors are named in an error."""


@attrs.frozen
class Names:
    """A file's names of the parts of a model.

    Args:
        ours: A tensor's or module's name in the file → ours.
        theirs: And back, for messages.
        fused: A module's name, of ours → the modules whose rows one matrix of the file holds, with their numbers.
        ignored: Beginnings of names in the file, or of ours, that the model does not need.
    """

    ours: Callable[[str], str]
    theirs: Callable[[str], str]
    fused: Callable[[str], Mapping[str, int]] = attrs.field(default=lambda name: {name: 0})
    ignored: tuple[str, ...] = ()


def load_weights_(
    model: TransformerDecoder | TransformerEncoder, checkpoint: Checkpoint, session: Session, names: Names, where: str
) -> None:
    """Fill a model whose parameters are on the meta device; it is in evaluation mode then, and nothing needs gradients.

    Args:
        model: The model.
        checkpoint: The opened file.
        session: Makes the 4-bit layers; its ``compute_dtype``, else float32, is that of all dense tensors.
        names: What the file calls the parts.
        where: The file, for messages.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or has no place in the model.
    """
    _Loader(model, checkpoint, session, names, where).fill()


@contextlib.contextmanager
def loading_watched(watch: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``watch(done, total)`` with a number of blocks, whenever a model is loaded inside the ``with`` block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


class _Loader:
    def __init__(self, model: Any, checkpoint: Checkpoint, session: Session, names: Names, where: str) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._session = session
        self._names = names
        self._where = where
        self._dtype = session.config.compute_dtype or torch.float32
        self._device = resolve_device(resolve_config(session.config), torch.device("cpu"))  # where a file's weights are
        self._biases: dict[str, torch.Tensor] = {}
        self._is_tied = getattr(model, "is_tied", False)  # an encoder has no head
        self._left = {
            ours: name
            for name in (*checkpoint, *checkpoint.dense)
            if not (ours := names.ours(name)).startswith(names.ignored) and not name.startswith(names.ignored)
        }

        if self._is_tied and not {"embed_tokens", "embed_tokens.weight"} & {*self._left}:
            for leaf in ("", ".weight"):  # some files hold what is shared as the head
                if name := self._left.pop(f"lm_head{leaf}", None):
                    self._left[f"embed_tokens{leaf}"] = name

    def fill(self) -> None:
        model, fused = self._model, self._fused()
        self._require_all(fused)
        # Block by block, and the largest matrices first, so that the peak of memory holds little twice.
        places = [("", model), *((f"layers.{number}.", block) for number, block in enumerate(model.layers))]
        for done, (at, module) in enumerate(places, 1):
            parts: dict[str, Part] = {}
            for name, inner in list(module.named_modules()):
                if not at and name.startswith("layers."):
                    continue
                if isinstance(inner, nn.Linear):
                    if part := fused.pop(at + name, None) or self._linear(at + name, inner):
                        parts[name] = part
                elif isinstance(inner, nn.Embedding):
                    self._embed(at + name, inner)
                else:
                    self._own(at + name, inner)
            place_linears_(module, parts, self._session)
            _watch.get()(done, len(places))
        if self._is_tied:
            for leaf in ("", ".weight"):
                self._left.pop(f"lm_head{leaf}", None)  # some files hold it twice
        self._finish()
        model.eval()

    def _linear(self, name: str, module: nn.Linear) -> Part | None:
        """Return the matrix of a linear layer; None of a head that is the embedding."""
        if self._is_tied and name == "lm_head":
            return None
        return self._part(name, module.out_features, module.in_features, biased=module.bias is not None)

    def _own(self, name: str, module: nn.Module) -> None:
        """Load a norm's parameters."""
        for own, parameter in list(module.named_parameters(recurse=False)):
            tensor = self._dense(f"{name}.{own}", tuple(parameter.shape))
            setattr(module, own, nn.Parameter(tensor, requires_grad=False))

    def _embed(self, name: str, module: nn.Embedding) -> None:
        """Load an embedding, and with it the head that is the same."""
        part = self._part(name, module.num_embeddings, module.embedding_dim, biased=False)
        is_head = self._is_tied and name == "embed_tokens"
        if isinstance(part.weight, PackedWeight):
            layer = self._session.linear(part.weight, name=part.name)
            setattr(self._model, name, PackedEmbedding(layer, self._dtype))
            if is_head:
                self._model.lm_head = layer
            return
        module.weight = nn.Parameter(part.weight, requires_grad=False)
        if is_head:
            self._model.lm_head.weight = module.weight

    def _fused(self) -> dict[str, Part]:
        """Load the matrices that hold the rows of several layers, and return each layer's."""
        parts = {}
        self._split_biases()
        for ours, theirs in list(self._left.items()):
            inner = self._names.fused(ours.removesuffix(".weight"))
            if len(inner) < 2:  # noqa: PLR2004  # several
                continue
            is_packed = theirs in self._checkpoint
            whole: Any = self._checkpoint[theirs] if is_packed else self._checkpoint.dense[theirs]
            if not is_packed and whole.dim() == 3:  # noqa: PLR2004  # experts
                whole = whole.flatten(0, 1)
            columns = self._model.get_submodule(next(iter(inner))).in_features
            self._check_shape(theirs, tuple(whole.shape), (sum(inner.values()), columns))
            del self._left[ours]
            start = 0
            for name, rows in inner.items():
                part = whole.narrow(0, start, rows)
                start += rows
                bias = self._biases.pop(name, None)
                parts[name] = Part(name, part if is_packed else part.to(self._device, self._dtype, copy=True), bias)
        return parts

    def _split_biases(self) -> None:
        """Cut the biases that belong to several layers."""
        for ours in [name for name in self._left if name.endswith(".bias")]:
            inner = self._names.fused(ours.removesuffix(".bias"))
            if len(inner) > 1:
                theirs = self._left.pop(ours)
                whole = self._checkpoint.dense[theirs].flatten()
                self._check_shape(theirs, tuple(whole.shape), (sum(inner.values()),))
                pieces = whole.to(self._device, self._dtype, copy=True).split([*inner.values()])
                self._biases |= dict(zip(inner, pieces, strict=True))

    def _fail(self, name: str, rule: str, value: Any, hint: str | None = None) -> NoReturn:
        what = f"tensor {name!r}"
        raise CheckpointError("model", name=what, rule=rule, value=value, where=self._where, hint=hint)

    def _require_all(self, fused: Mapping[str, Part]) -> None:
        """Refuse a file without a tensor that the model needs, before anything is read; all of them are named."""
        there = {*self._left, *(f"{name}.weight" for name in (*self._left, *fused))}
        there |= {f"{name}.bias" for name in self._biases}
        there |= {f"{name}.bias" for name, part in fused.items() if part.bias is not None}
        head = "lm_head." if self._is_tied else "\0"
        missing = [name for name in self._model.state_dict() if name not in there and not name.startswith(head)]
        if not missing:
            return
        names = [self._names.theirs(name) for name in missing]
        for problem in self._checkpoint.schema.unsupported:  # there, in a form that is not read
            for name in names:
                if problem.key in {name, name.removesuffix(".weight")}:
                    self._fail(name, problem.rule, problem.value)
        found = f"{len(names)} missing: {', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}"
        self._fail(names[0], "present", found, "The file holds a part of the model, or is damaged.")

    def _dense(self, ours: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = self._left.pop(ours)
        tensor = self._checkpoint.dense[name]
        self._check_shape(name, tuple(tensor.shape), shape)
        # A copy: views would keep the whole file mapped for a few kilobytes.
        return tensor.to(self._device, self._dtype, copy=True)

    def _part(self, ours: str, out_features: int, in_features: int, *, biased: bool) -> Part:
        """Load a matrix from the file, and its bias where the model has one."""
        shape = (out_features, in_features)
        bias = self._biases.pop(ours, None) if biased else None
        if biased and bias is None:
            bias = self._dense(f"{ours}.bias", (out_features,))
        name = self._left.pop(ours, None)
        if name is None:
            name = self._left[f"{ours}.weight"].removesuffix(".weight")
            return Part(name, self._dense(f"{ours}.weight", shape), bias)
        weight = self._checkpoint[name]
        self._check_shape(f"{name}.weight", tuple(weight.shape), shape)
        return Part(name, weight, bias)

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            self._fail(name, f"of shape {list(wanted)}, which the model's sizes ask for", list(found))

    def _finish(self) -> None:
        if self._left:
            names = sorted(self._left.values())
            hint = "The model has parts that this version does not compute; its answers would be wrong."
            found = f"{len(names)} unknown: {', '.join(names[:_NAMED])}"
            self._fail(names[0], "one that the architecture knows", found, hint)
