"""A 4-bit model behind Ray Serve: replicas start and stop with the load, and map one file of prepared layers.

    serve run examples.serve_ray:app folder=FOLDER

Ask it by ``curl localhost:8000 -d '{"prompt": "The capital of France is", "max_tokens": 16}'``. It needs q4-lm and ray:
pip install "q4core[examples]" "ray[serve]"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ray import serve

from q4_lm import Generation, LanguageModel

if TYPE_CHECKING:
    from starlette.requests import Request


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 2},
)
class Completions:
    """A model that continues prompts; each replica runs on one core.

    Args:
        folder: The model's folder, or a GGUF file. The first replica prepares its layers; the others map them.
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = LanguageModel.open(folder)

    def complete(self, prompt: str, max_tokens: int = 64) -> dict[str, Any]:
        """Return the greedy continuation of a prompt."""
        model = self.model
        tokens = [*Generation(model.decoder, model.tokenizer.encode(prompt), max_tokens)]
        return {"text": model.tokenizer.decode(tokens), "tokens": tokens}

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer a request whose body is JSON with ``prompt`` and, if given, ``max_tokens``."""
        asked = await request.json()
        return self.complete(asked["prompt"], asked.get("max_tokens", 64))


def app(arguments: dict[str, str]) -> serve.Application:
    """Return the application for ``serve run``."""
    return Completions.bind(arguments["folder"])  # type: ignore[attr-defined,no-any-return]  # made by the decorator
