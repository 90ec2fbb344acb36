"""vLLM's stand-ins, installed before the plugin is imported: vLLM itself has an environment of its own."""

from __future__ import annotations

import vllm_stubs

vllm_stubs.install()
