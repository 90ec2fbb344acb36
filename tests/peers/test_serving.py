"""``docs/serve.md`` and ``examples/serve_ray.py``: servers for 4-bit models that are not vLLM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_models import save_by_q4

from q4_lm import Generation, LanguageModel
from tests.support.limits import scaled
from tests.support.pages import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    import ray
    from ray import serve

    from examples.serve_ray import app

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
PROMPT, COUNT = "some words come here", 8
WORDS = ["<unk>", "<|end|>", *PROMPT.split(), *(f"w{number}" for number in range(58))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama in ModelOpt's NVFP4, which transformers alone can't load, with a vocabulary of words."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tmp_path_factory.mktemp("served")
    save_by_q4(made, "modelopt-nvfp4", "nvfp4", vocab_size=64)
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")  # noqa: S106  # no password
    engine = tokenizers.Tokenizer(words)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    engine.save(str(made / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "unk_token": "<unk>"}
    facts["chat_template"] = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (made / "tokenizer_config.json").write_text(json.dumps(facts))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Return the greedy tokens in this process."""
    with LanguageModel.open(folder, cache="off") as model:
        return [*Generation(model.decoder, model.tokenizer.encode(PROMPT), COUNT)]


@pytest.fixture(scope="module")
def ray_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give Ray Serve on a cluster of one node, with a cache of prepared models of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("Q4_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False)
        yield serve
        serve.shutdown()
        ray.shutdown()


def test_ray_serve(ray_serve: Any, folder: Path, expected: list[int]) -> None:
    """The deployment answers by HTTP with this process's tokens; a second replica maps what the first prepared."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    handle = ray_serve.run(app({"folder": str(folder)}))
    body = json.dumps({"prompt": PROMPT, "max_tokens": COUNT}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", body, timeout=scaled(120.0)) as answer:
        assert json.load(answer)["tokens"] == expected
    waiting = [handle.complete.remote(PROMPT, COUNT) for _ in range(8)]
    assert [item.result(timeout_s=scaled(120.0))["tokens"] for item in waiting] == [expected] * 8


def test_transformers_serve(folder: Path, expected: list[int]) -> None:
    """The command of the page serves a folder that names another library, packed, with OpenAI's interface."""
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    (line,) = [line.strip() for line in page.splitlines() if line.strip().startswith("python -m q4_transformers")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = line.replace("FOLDER", str(folder)).split()[1:]
    command = [sys.executable, *words, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}) as server:
        try:
            asked = {"model": str(folder), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": COUNT}
            body, head = json.dumps({**asked, "stream": False}).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, head)
            end = time.monotonic() + scaled(300.0)
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=scaled(120.0)) as answer:  # noqa: S310  # our own server
                        found = json.load(answer)
                    break
                except urllib.error.URLError:
                    assert server.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.5)
        finally:
            server.terminate()
    assert found["choices"][0]["message"]["content"].split() == [WORDS[token] for token in expected]
