"""A language model in one object: decoder, tokenizer, chat template, and the session that its layers belong to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import q4core as q4
from q4_lm.models.architecture import build_decoder, find_architecture
from q4_lm.models.metadata import Metadata
from q4_lm.models.transformer import TransformerDecoder
from q4_lm.prepared.opening import CachedModel, open_folder, opening
from q4_lm.tokenizers.chat import render_chat
from q4_lm.tokenizers.hf_tokenizer import read_chat_template
from q4_lm.tokenizers.tokenizer import Tokenizer
from q4_lm.tokenizers.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["LanguageModel"]


@attrs.frozen
class LanguageModel:
    """A model that continues texts.

    Args:
        decoder: Token numbers to logits.
        tokenizer: Texts to token numbers.
        session: What the decoder's layers were prepared under; closed with the model.
        chat_template: Template of a conversation (jinja2), or None.
        special: Texts of the special tokens that a template may name.
        where: The file or folder, for messages.
        cached: What became of its file in the cache; None without a cache.
    """

    decoder: TransformerDecoder
    tokenizer: Tokenizer
    session: q4.Session
    chat_template: str | None
    special: Mapping[str, str | None]
    where: str
    cached: CachedModel | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: q4.SessionConfig | None = None,
        *,
        cache: str | os.PathLike[str] = "auto",
    ) -> LanguageModel:
        """Open a GGUF file or a Hugging Face directory and prepare its layers, or map what was prepared before.

        Args:
            path: The file, or the directory with ``config.json``, ``tokenizer.json`` and safetensors files; no code
                of it is run.
            config: What to ask for; unset fields ask the context, the environment and the default.
            cache: Where prepared models are: ``"auto"`` asks ``Q4_CACHE`` (a folder, or ``off``) and else takes the
                user's cache folder; ``"off"`` has none; or a folder. The first opening writes a file there, later ones
                map it, without the weights of ``path`` being read. One that is stale or damaged is written again, with
                one ``CacheWarning``. The vocabulary is then built when a text is first encoded or decoded.

        Raises:
            CheckpointError: The file is malformed, or holds a model that is not supported.
            BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run its layers.
            ConfigError: ``cache``, or the variables that it asks, are not legal.
        """
        with opening(Path(path), config, cache) as (session, cached):
            if (folder := Path(path)).is_dir():
                return cls._from_folder(folder, session, cached)
            return cls._from_file(os.fspath(path), session, cached)

    @classmethod
    def _from_folder(cls, folder: Path, session: q4.Session, cached: CachedModel | None) -> LanguageModel:
        decoder, tokenizer = open_folder(folder, session, cached)
        template, special = read_chat_template(folder)
        if not isinstance(decoder, TransformerDecoder):
            rule = "of a decoder; an encoder gives no text"
            raise q4.CheckpointError("model folder", name="model_type", rule=rule, value="bert", where=str(folder))
        return cls(decoder, tokenizer, session, template, special, str(folder), cached)

    @classmethod
    def _from_file(cls, path: str, session: q4.Session, cached: CachedModel | None) -> LanguageModel:
        def restored(decoder: TransformerDecoder, extra: dict[str, Any], text: memoryview) -> LanguageModel:
            tokenizer = Tokenizer(lambda: Vocabulary(**json.loads(bytes(text))).engine(), **extra["tokenizer"])
            return cls(decoder, tokenizer, session, extra["chat_template"], extra["special"], path, cached)

        if cached is not None and (found := cached.open(restored)) is not None:
            return found
        with q4.open(path) as checkpoint:
            metadata = Metadata(checkpoint.metadata, path)
            architecture = find_architecture(metadata)  # before the seconds that a vocabulary takes
            vocabulary = read_vocabulary(metadata)
            facts = architecture.config(checkpoint, metadata)
            if len(vocabulary.tokens) > facts.vocab_size:
                rule = f"at most {facts.vocab_size} items long, as the embedding has rows"
                metadata.fail("tokenizer.ggml.tokens", rule, len(vocabulary.tokens))
            decoder = build_decoder(checkpoint, session, metadata, facts)
        special = {
            f"{name}_token": vocabulary.tokens[metadata.integer(f"tokenizer.ggml.{name}_token_id", low=0)]
            for name in ("bos", "eos")
            if f"tokenizer.ggml.{name}_token_id" in metadata
        }
        template, tokenizer = metadata.text("tokenizer.chat_template", default=None), vocabulary.build()
        if cached is not None and architecture.is_storable:
            extra = {"tokenizer": tokenizer.ends, "chat_template": template, "special": special}
            text = json.dumps(attrs.asdict(vocabulary, recurse=False), ensure_ascii=False)
            cached.write(decoder, extra, text.encode())
        return cls(decoder, tokenizer, session, template, special, path, cached)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token numbers of a conversation, up to where the assistant's answer begins.

        Args:
            messages: Each with ``role`` and ``content``.

        Raises:
            CheckpointError: There is no chat template, or it does not take these messages.
        """
        if self.chat_template is None:
            hint = "The model has no chat template; use the raw mode."
            raise q4.CheckpointError("model", name="chat_template", rule="present", where=self.where, hint=hint)
        special: dict[str, Any] = dict(self.special)
        text = render_chat(self.chat_template, messages, where=self.where, **special)
        # A template writes BOS itself where the model wants one.
        return self.tokenizer.encode(text, add_bos=False)

    def close(self) -> None:
        """Release all prepared memory."""
        self.session.close()

    def __enter__(self) -> LanguageModel:  # noqa: PYI034  # Self needs Python 3.11
        """Return the model."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model."""
        self.close()
