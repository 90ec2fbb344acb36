"""Sentences to vectors, as the folder's own parts make them of an encoder's features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from tokenizers import normalizers

import q4core as q4
from q4_lm.generation.encoding import EncodingProgram, EncodingPrograms
from q4_lm.generation.sentence_modules import SentenceModules, modules_of_file, read_modules
from q4_lm.models.architecture import build_model, find_architecture
from q4_lm.models.gguf_bert import read_pooling
from q4_lm.models.metadata import Metadata
from q4_lm.models.transformer import TransformerDecoder, TransformerEncoder
from q4_lm.prepared.opening import CachedModel, open_folder, opening
from q4_lm.tokenizers.hf_tokenizer import read_engine
from q4_lm.tokenizers.tokenizer import Tokenizer
from q4_lm.tokenizers.vocabulary import Vocabulary, read_vocabulary
from q4core import InputError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer as Engine

__all__ = ["SentenceEncoder"]


@attrs.frozen
class SentenceEncoder:
    """A model that gives a vector for each sentence, as sentence-transformers' models do.

    Where its linear layers are packed and a backend runs programs, a batch is one call: sentences one after another,
    without padding, up to the vector that is pooled. A sentence has the bits that it has alone.

    Args:
        encoder: Token numbers to features; a decoder without its head where the folder's parts say so.
        tokenizer: Sentences to token numbers.
        session: What 4-bit layers were prepared under; closed with the model.
        limit: Tokens of a sentence; what is longer is cut before its last mark.
        modules: What makes a vector of a sentence's features, and the prompts.
        cached: What became of its file in the cache; None without a cache.
    """

    encoder: TransformerEncoder | TransformerDecoder
    tokenizer: Tokenizer
    session: q4.Session
    limit: int
    modules: SentenceModules
    cached: CachedModel | None = None
    _programs: EncodingPrograms = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(
            lambda self: EncodingPrograms(
                self.encoder,
                self.limit,
                self.modules.pooling if self.modules.pools_in_program else (),
                normalised=self.modules.is_normalised,
            ),
            takes_self=True,
        ),
    )

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        config: q4.SessionConfig | None = None,
        *,
        cache: str | os.PathLike[str] = "auto",
    ) -> SentenceEncoder:
        """Open a Hugging Face directory or a GGUF file of an encoder, or map what was prepared of it before.

        Args:
            folder: With ``config.json``, ``tokenizer.json`` and safetensors files. Where ``modules.json`` is there, its
                parts make the vectors: a Transformer, a Pooling, then Dense and Normalize. Without it, ``1_Pooling``
                or the mean does, and vectors have length one. Or a GGUF file of BERT, which says the pooling.
            config: What to ask for; unset fields ask the context, the environment and the default.
            cache: As ``LanguageModel.open`` takes it.

        Raises:
            CheckpointError: A file is missing or malformed, the model is no encoder, or a part is not computed here.
            ConfigError: ``cache``, or the variables that it asks, are not legal.
        """
        if Path(folder).is_file():
            return cls._from_file(Path(folder), config, cache)
        modules, is_listed = read_modules(Path(folder)), Path(folder, "modules.json").is_file()
        folder = modules.encoder
        with opening(folder, config, cache) as (session, cached):
            encoder, tokenizer = open_folder(folder, session, cached)
            encoder = _checked(encoder, modules, str(folder), may_decode=is_listed)
            if modules.lower_case:
                tokenizer = Tokenizer(lambda: _lower(read_engine(folder)), **tokenizer.ends)
            modules.head.to(encoder.device)
            limit = encoder.config.max_position_embeddings
            return cls(encoder, tokenizer, session, min(limit, modules.limit or limit), modules, cached)

    @classmethod
    def _from_file(cls, path: Path, config: q4.SessionConfig | None, cache: str | os.PathLike[str]) -> SentenceEncoder:
        def restored(model: Any, extra: dict[str, Any], text: memoryview) -> tuple[Any, Tokenizer, str]:
            words = bytes(text)
            tokenizer = Tokenizer(lambda: Vocabulary(**json.loads(words)).engine(), **extra["tokenizer"])
            return model, tokenizer, extra["pooling"]

        with opening(path, config, cache) as (session, cached):
            found = None if cached is None else cached.open(restored)
            if found is None:
                with q4.open(path) as checkpoint:
                    metadata = Metadata(checkpoint.metadata, str(path))
                    if (name := find_architecture(metadata).name) != "bert":
                        hint = "LanguageModel.open reads decoders."
                        metadata.fail("general.architecture", "'bert', an encoder", name, hint)
                    pooling, vocabulary = read_pooling(metadata), read_vocabulary(metadata)
                    found = build_model(checkpoint, session, metadata), vocabulary.build(), pooling
                if cached is not None:
                    text = json.dumps(attrs.asdict(vocabulary, recurse=False), ensure_ascii=False)
                    cached.write(found[0], {"tokenizer": found[1].ends, "pooling": pooling}, text.encode())
            encoder, tokenizer, pooling = found
            modules = modules_of_file(path, pooling)
            encoder = _checked(encoder, modules, str(path))
            return cls(encoder, tokenizer, session, encoder.config.max_position_embeddings, modules, cached)

    def encode(
        self,
        sentences: Sequence[str],
        *,
        prompt: str | None = None,
        batch: int = 32,
        watch: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> torch.Tensor:
        """Return one vector for each sentence: float32 [n, features], on the CPU.

        Args:
            sentences: Texts; what is longer than the model's context is cut.
            prompt: Name of one of the folder's prompts, whose text precedes each sentence. Defaults to the
                folder's default prompt, if it has one.
            batch: Sentences at once.
            watch: Called after each batch, with the number of sentences that are done, and of all.

        Raises:
            InputError: ``sentences`` is a single text, or empty, ``batch`` is below 1, or there is no such prompt.
        """
        if batch < 1:
            raise InputError("SentenceEncoder", name="batch", rule="at least 1", value=batch)
        if isinstance(sentences, str) or not sentences:
            raise InputError("SentenceEncoder", name="sentences", rule="a list of at least one text", value=sentences)
        head = self._prompt(self.modules.default_prompt if prompt is None else prompt)
        rows = [self.tokenizer.encode_whole(head + text) for text in sentences]
        rows = [row if len(row) <= self.limit else [*row[: self.limit - 1], row[-1]] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # alike lengths together
        program, found = self._programs.find(max(map(len, rows))), list[torch.Tensor]()
        for start in range(0, len(rows), batch):
            chosen = order[start : start + batch]
            found.append(self._vectors(program, [rows[index] for index in chosen]))
            watch(start + len(chosen), len(rows))
        return torch.cat(found)[torch.tensor(order).argsort()]

    @torch.inference_mode()
    def _vectors(self, program: EncodingProgram | None, rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        if program is not None:
            if self.modules.pools_in_program:
                return self.modules.finish(torch.stack(program(rows)))
            return torch.cat([self.modules.pool(item[None], torch.ones(1, len(item))) for item in program(rows)])
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.encoder.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.encoder.device)
        allowed = torch.arange(longest, device=self.encoder.device) < lengths[:, None]
        encode = self.encoder.features if isinstance(self.encoder, TransformerDecoder) else self.encoder
        features = encode(tokens, allowed=allowed).to(torch.float32)
        return self.modules.pool(features, allowed).cpu()

    def _prompt(self, name: str | None) -> str:
        known = self.modules.prompts
        if name is None or name in known:
            return "" if name is None else known[name]
        close = closest_name(name, known)
        hint = f"Did you mean {close!r}?" if close else "Put the text before the sentences yourself."
        rule = f"one of the folder's ({', '.join(known) or 'none'})"
        raise InputError("SentenceEncoder", name="prompt", rule=rule, value=name, hint=hint)

    def close(self) -> None:
        """Release all prepared memory."""
        self.session.close()

    def __enter__(self) -> SentenceEncoder:  # noqa: PYI034  # Self needs Python 3.11
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()


def _checked(
    encoder: torch.nn.Module, modules: SentenceModules, where: str, *, may_decode: bool = False
) -> TransformerEncoder | TransformerDecoder:
    """Return the encoder, once it is one and each linear layer after pooling takes what comes before it."""
    kinds = (TransformerEncoder, TransformerDecoder) if may_decode else TransformerEncoder
    if not isinstance(encoder, kinds):
        rule, hint = "of an encoder", "LanguageModel.open reads decoders."
        raise q4.CheckpointError("model folder", name="model_type", rule=rule, where=where, hint=hint)
    width = encoder.config.hidden_size * len(modules.pooling)
    for layer in modules.head:
        if isinstance(layer, torch.nn.Linear) and layer.in_features != width:
            rule, value = f"{width}, the features before the layer", layer.in_features
            raise q4.CheckpointError("sentence encoder", name="in_features", rule=rule, value=value, where=where)
        width = getattr(layer, "out_features", width)
    return encoder


def _lower(engine: Engine) -> Engine:
    """Return a tokenizer whose texts, but for special tokens in them, are written in lower case first."""
    steps = [normalizers.Lowercase(), *([] if engine.normalizer is None else [engine.normalizer])]
    engine.normalizer = normalizers.Sequence(steps)
    return engine
