"""Fixtures of a tiny Llama with random weights, and of its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from q4_lm.models.metadata import Metadata
from q4_lm.tokenizers.vocabulary import build_tokenizer
from tests.support.events import forget_warnings, heard
from tests.support.tiny_llama import vocabulary, write_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from q4_lm.tokenizers.tokenizer import Tokenizer


@pytest.fixture(name="vocabulary")
def vocabulary_fixture() -> dict[str, Any]:
    """Return the tokenizer's part of the metadata, to change at will."""
    return vocabulary()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return the small tokenizer."""
    return build_tokenizer(Metadata(vocabulary(), "tiny"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the tiny model, whose embedding is also its head."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf")


@pytest.fixture(scope="session")
def untied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a tiny model with a head of its own."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "untied.gguf", tied=False)


@pytest.fixture
def write_llama(tmp_path: Path) -> Any:
    """Return a function that writes a changed tiny model."""
    return lambda **changes: write_tiny_llama(tmp_path / "changed.gguf", **changes)


@pytest.fixture(name="cache_states")
def cache_states_fixture() -> Iterator[Any]:
    """Return a function that gives the states that the cache's events report; every warning may be given again."""
    forget_warnings()
    with heard("q4.cache") as events:
        yield lambda: [event["state"] for event in events]
