"""A language model in one object: decoder, tokenizer, chat template, and the session that its layers belong to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs

import q4core as q4
from q4_nn.chat import render_chat
from q4_nn.metadata import Metadata
from q4_nn.models.architecture import build_decoder, find_architecture
from q4_nn.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from q4_nn.models.transformer import TransformerDecoder
    from q4_nn.tokenizer import Tokenizer

__all__ = ["LanguageModel"]


@attrs.frozen
class LanguageModel:
    """A model that continues texts.

    Args:
        decoder: Token numbers to logits.
        tokenizer: Texts to token numbers.
        metadata: The file's metadata.
        session: What the decoder's layers were prepared under; closed with the model.
    """

    decoder: TransformerDecoder
    tokenizer: Tokenizer
    metadata: Metadata
    session: q4.Session

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: q4.SessionConfig | None = None) -> LanguageModel:
        """Open a model file and prepare its layers.

        Args:
            path: The file.
            config: What to ask for; unset fields ask the context, the environment and the default.

        Raises:
            CheckpointError: The file is malformed, or holds a model that is not served.
            BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve its layers.
        """
        checkpoint = q4.open(path)
        metadata = Metadata(checkpoint.metadata, os.fspath(path))
        find_architecture(metadata)  # before the seconds that a vocabulary takes
        tokenizer = build_tokenizer(metadata)
        session = q4.Session(config)
        try:
            decoder = build_decoder(checkpoint, session, metadata)
        except BaseException:
            session.close()
            raise
        return cls(decoder, tokenizer, metadata, session)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token numbers of a conversation, up to where the assistant starts to speak.

        Args:
            messages: Each with ``role`` and ``content``.

        Raises:
            CheckpointError: There is no chat template, or it does not take these messages.
        """
        if "tokenizer.chat_template" not in self.metadata:
            self.metadata.fail(
                "tokenizer.chat_template", "present", hint="The model has no chat template; use the raw mode."
            )
        special: dict[str, Any] = {
            f"{name}_token": self.tokenizer.token_text(self.metadata.integer(f"tokenizer.ggml.{name}_token_id", low=0))
            for name in ("bos", "eos")
            if f"tokenizer.ggml.{name}_token_id" in self.metadata
        }
        template = self.metadata.text("tokenizer.chat_template")
        text = render_chat(template, messages, where=self.metadata.where, **special)
        # A template writes BOS itself where the model wants one.
        return self.tokenizer.encode(text, add_bos=False)

    def close(self) -> None:
        """Give every prepared byte back."""
        self.session.close()

    def __enter__(self) -> LanguageModel:  # noqa: PYI034  # Self needs Python 3.11
        """Return the model."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model."""
        self.close()
