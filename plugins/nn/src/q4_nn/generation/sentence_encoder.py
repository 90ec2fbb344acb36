"""Sentences to vectors: an encoder's features, averaged and scaled to length one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import torch

import q4core as q4
from q4_nn.models.read_json import read_json
from q4_nn.models.transformer import TransformerEncoder
from q4_nn.prepared.opening import CachedModel, open_folder
from q4_nn.prepared.store import open_store
from q4core import InputError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from q4_nn.generation.tokenizer import Tokenizer

__all__ = ["SentenceEncoder"]


@attrs.frozen
class SentenceEncoder:
    """A model that gives a vector for each sentence, as the MiniLM models of sentence-transformers do.

    Args:
        encoder: Token numbers to features.
        tokenizer: Sentences to token numbers.
        session: What 4-bit layers were prepared under; closed with the model.
        limit: Tokens of a sentence; what is longer is cut before its last mark.
        pooling: ``"mean"`` over a sentence's features, or ``"cls"`` for its first one's.
        cached: What became of its file in the cache; None without a cache.
    """

    encoder: TransformerEncoder
    tokenizer: Tokenizer
    session: q4.Session
    limit: int
    pooling: Literal["mean", "cls"] = "mean"
    cached: CachedModel | None = None

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        config: q4.SessionConfig | None = None,
        *,
        cache: str | os.PathLike[str] = "auto",
    ) -> SentenceEncoder:
        """Open a Hugging Face directory of an encoder, or map what was prepared of it before.

        Args:
            folder: With ``config.json``, ``tokenizer.json`` and safetensors files; ``sentence_bert_config.json`` and
                ``1_Pooling/config.json`` are obeyed where they are there.
            config: What to ask for; unset fields ask the context, the environment and the default.
            cache: As ``LanguageModel.open`` takes it.

        Raises:
            CheckpointError: A file is missing or malformed, the model is no encoder, or pools otherwise.
            ConfigError: ``cache``, or the variables that it asks, are not legal.
        """
        store = open_store(cache)
        folder = Path(folder)
        pooling = _pooling(folder)
        session = q4.Session(config)
        try:
            cached = None if store is None else CachedModel(store, folder, session)
            encoder, tokenizer = open_folder(folder, session, cached)
        except BaseException:
            session.close()
            raise
        if not isinstance(encoder, TransformerEncoder):
            session.close()
            rule, hint = "of an encoder", "LanguageModel.open reads decoders."
            raise q4.CheckpointError("model folder", name="model_type", rule=rule, where=str(folder), hint=hint)
        limit = encoder.config.max_position_embeddings
        told = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
        return cls(encoder, tokenizer, session, min(limit, told) if isinstance(told, int) else limit, pooling, cached)

    def encode(self, sentences: Sequence[str], *, batch: int = 32) -> torch.Tensor:
        """Return one vector of length one for each sentence: float32 [n, hidden].

        Args:
            sentences: Texts; what is longer than the model's context is cut.
            batch: Sentences at once.

        Raises:
            InputError: ``sentences`` is a single text, or empty.
        """
        if isinstance(sentences, str) or not sentences:
            raise InputError("SentenceEncoder", name="sentences", rule="a list of at least one text", value=sentences)
        rows = [self.tokenizer.encode_whole(text) for text in sentences]
        rows = [row if len(row) <= self.limit else [*row[: self.limit - 1], row[-1]] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # alike lengths together
        found: list[tuple[int, torch.Tensor]] = []
        for start in range(0, len(rows), batch):
            chosen = order[start : start + batch]
            found += zip(chosen, self._vectors([rows[index] for index in chosen]), strict=True)
        return torch.stack([vector for _, vector in sorted(found, key=lambda item: item[0])])

    @torch.inference_mode()
    def _vectors(self, rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.encoder.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.encoder.device)
        allowed = torch.arange(longest, device=self.encoder.device) < lengths[:, None]
        features = self.encoder(tokens, allowed=allowed).to(torch.float32)
        found = features[:, 0] if self.pooling == "cls" else (features * allowed[..., None]).sum(1) / lengths[:, None]
        return torch.nn.functional.normalize(found, dim=-1).cpu()

    def close(self) -> None:
        """Give every prepared byte back."""
        self.session.close()

    def __enter__(self) -> SentenceEncoder:  # noqa: PYI034  # Self needs Python 3.11
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()


def _pooling(folder: Path) -> Literal["mean", "cls"]:
    """Return how a directory of sentence-transformers makes one vector of many; the mean where it does not say."""
    path = folder / "1_Pooling" / "config.json"
    told = read_json(path)
    modes = {name for name, value in told.items() if name.startswith("pooling_mode_") and value is True}
    if not told or modes == {"pooling_mode_mean_tokens"}:
        return "mean"
    if modes == {"pooling_mode_cls_token"}:
        return "cls"
    rule, value = "pooling_mode_mean_tokens or pooling_mode_cls_token", ", ".join(sorted(modes))
    raise q4.CheckpointError("model folder", name="pooling", rule=rule, value=value, where=str(path))
