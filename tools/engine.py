"""q4-vllm in vLLM itself: ``python -m tools.engine`` in the environment of ``nox -s vllm``.

It compares the signatures of the tests' stand-ins with vLLM's, serves small random models packed and dequantised, and
stores what held, with versions, in ``benchmarks/results/vllm.json``. Without arguments it starts the engine twice, for
NF4 dequantised and packed, and a server of two ranks; ``-- nvfp4 moe`` runs other models.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import importlib.metadata
import inspect
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.verdict import Verdict

__all__ = ["QUIET", "Server", "main", "save_models"]

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "vllm.json"
PROMPTS, TOKENS, REQUESTS, LONG = 20, 32, 64, 100
"""Prompts and tokens that are compared; requests of the load, and the tokens that those ask for who leave early."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,  # of which two ranks have 352: no whole number of blocks of 64
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "head_dim": 32}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "nf4": ("Llama", "bitsandbytes", "nf4", {}),
    "nvfp4": ("Llama", "modelopt-nvfp4", "nvfp4", {}),
    "int4": ("Llama", "compressed-tensors-int4", "int4", {}),
    "gptq": ("Llama", "gptq", "int4", {}),
    "awq": ("Llama", "awq", "int4", {}),
    "q4_k": (
        "Llama",
        "gguf",
        "Q4_K",
        {"intermediate_size": 768},
    ),  # of which two ranks have one and a half super-blocks
    "moe": ("Qwen3Moe", "bitsandbytes", "nf4", _MOE),
    "moe-q4_0": ("Qwen3Moe", "gguf", "Q4_0", {**_MOE, "norm_topk_prob": True}),  # as such a file is read
    "mixtral-q4_0": ("Mixtral", "gguf", "Q4_0", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Name → transformers' class, dialect, format, and sizes of its own."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "Q4_PRECISION": "exact"}


def compare_signatures() -> int:
    """Return how many functions of the tests' stand-ins have the arguments of vLLM's; raise for one that has not."""
    sys.path.insert(0, str(ROOT / "plugins/vllm/tests"))
    stubs, count = importlib.import_module("vllm_stubs"), 0
    for module, items in stubs.MODULES.items():
        theirs = importlib.import_module(module)
        for item in items:
            real = getattr(theirs, item.__name__)
            pairs = [(item, real)] if inspect.isfunction(item) else []
            own = vars(item).items() if inspect.isclass(item) else ()
            pairs += [(getattr(item, name), getattr(real, name)) for name, _ in own if _is_method(item, name, real)]
            for stub, function in pairs:
                if list(inspect.signature(stub).parameters) != list(inspect.signature(function).parameters):
                    raise AssertionError(f"{module}.{item.__name__}: {stub.__name__} has other arguments in vLLM")
                count += 1
    return count


def _is_method(kind: type, name: str, real: type) -> bool:
    is_own = inspect.isroutine(getattr(kind, name)) and not name.startswith("__")
    return is_own and name in {item for base in real.__mro__ for item in vars(base)}


def save_models(  # noqa: PLR0913  # the facts of a model
    kind: str, sizes: dict[str, Any], format_: str, dialect: str, packed: Path, dense: Path
) -> Path:
    """Save a random model packed and, in another folder, dequantised; return the folder that is served packed.

    Args:
        kind: transformers' class without its ending.
        sizes: Of its config.
        format_: What matrices are packed in.
        dialect: How they are stored; ``gguf`` for a GGUF file of that type, whose folder is made.
        packed: One folder.
        dense: The other one.
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    safetensors = importlib.import_module("safetensors.torch")
    q4 = importlib.import_module("q4core")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # far from their first values, so that tokens differ
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3)
    model.save_pretrained(dense)
    state = safetensors.load_file(dense / "model.safetensors")
    chosen = [key for key, value in state.items() if value.dim() == 2 and re.search(r"proj\.|\.experts\.", key)]  # noqa: PLR2004  # matrices
    options = {"block_size": 64, "symmetric": dialect.startswith("compressed")} if format_ == "int4" else {}
    weights = {}
    for key in chosen:
        name = key.removesuffix(".weight")
        weights[name] = q4.quantize(state.pop(key), "nf4" if dialect == "gguf" else format_, name=name, **options)
    target = packed.with_name(f"{packed.name}-nf4") if dialect == "gguf" else packed
    model.config.save_pretrained(target)
    own = "bitsandbytes" if dialect == "gguf" else dialect
    q4.save_checkpoint(target, weights, dialect=own, dense=state, lossy=True)
    with _gguf_folder(target, format_, packed) if dialect == "gguf" else q4.open(packed) as checkpoint:
        # The dense model has what the file means.
        state |= {f"{key}.weight": q4.dequantize(checkpoint[key], torch.float32) for key in checkpoint}
    safetensors.save_file(state, dense / "model.safetensors", metadata={"format": "pt"})
    return packed


def _gguf_folder(source: Path, type_: str, packed: Path) -> Any:
    """Pack a folder's layers again as a GGUF file, and return the weights of the folder that vLLM serves of it."""
    gguf = importlib.import_module("q4_vllm.gguf")
    file = packed.with_suffix(".gguf")
    words = ["convert", str(source), str(file), "--dialect", "gguf", "--requantize", "--format", type_]
    subprocess.run([sys.executable, "-m", "q4_cli", *words], check=True, stdout=subprocess.DEVNULL)
    return gguf.open_folder(gguf.make_folder(file, packed))


def prompts() -> list[list[int]]:
    """Return the prompts, as tokens."""
    chance = random.Random(0)  # noqa: S311  # no secrets
    return [[chance.randrange(3, 500) for _ in range(chance.randrange(4, 24))] for _ in range(PROMPTS)]


def generate(folder: str, *, is_packed: bool, is_eager: bool, batch: int) -> list[list[int]]:
    """Return the greedy tokens of an engine in this process."""
    vllm = importlib.import_module("vllm")
    method = "q4" if is_packed else None
    engine = vllm.LLM(
        folder, quantization=method, enforce_eager=is_eager, dtype="float32", skip_tokenizer_init=True,
        max_model_len=128, max_num_seqs=batch,
    )  # fmt: skip
    asked = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts()], asked)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _engine(folder: Path, *options: str) -> list[list[int]]:
    """Return the greedy tokens of an engine in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "tokens.json")
        command = [sys.executable, "-m", "tools.engine", "--generate", str(folder), "--out", str(out), *options]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **QUIET}, check=True)
        found: list[list[int]] = json.loads(out.read_text(encoding="utf-8"))
        return found


class Server:
    """vLLM's server with two ranks, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = ["--quantization", "q4", "--tensor-parallel-size", "2", "--dtype", "float32", "--skip-tokenizer-init"]
        options += ["--max-model-len", "128", "--port", str(self.port), "--host", "127.0.0.1", "--enforce-eager"]
        module = "vllm.entrypoints.openai.api_server"
        command = [sys.executable, "-m", module, "--model", str(folder), "--served-model-name", "small", *options]
        variables = {**os.environ, **QUIET, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # else vLLM asks for two NUMA nodes
        self.process = subprocess.Popen(command, env=variables, start_new_session=True)

    def wait(self, seconds: float = 900) -> None:
        """Wait until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()  # our own server
            except OSError:
                time.sleep(1)
            else:
                return
        raise RuntimeError(f"the server did not start: status {self.process.poll()}")

    def ask(self, prompt: list[int], seconds: float = 600, tokens: int = TOKENS) -> list[int]:
        """Return the greedy tokens for a prompt."""
        asked = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        body = json.dumps({**asked, "detokenize": False, "return_token_ids": True}).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, head)  # our own server
        with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310  # our own server
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
            return found

    def processes(self, part: str = "") -> list[int]:
        """Return its processes whose names have a part."""
        listed = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        return [int(pid) for pid, group, name in rows if int(group) == self.process.pid and part in name]

    def stop(self) -> None:
        """End it and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()


def _load(server: Server, expected: list[list[int]]) -> dict[str, int]:
    """Ask 64 times at once, of which every fourth caller leaves early; return how many of the others were right."""
    asked, right, left = prompts(), [], []

    def call(number: int) -> None:
        index = number % len(asked)
        if number % 4 == 3:  # noqa: PLR2004  # every fourth
            try:
                server.ask(asked[index], 0.02, LONG)
            except OSError:
                left.append(number)
            return
        right.append(server.ask(asked[index]) == expected[index])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"requests": REQUESTS, "answered": len(right), "equal": sum(right), "cancelled": len(left)}


def _shared() -> set[str]:
    """Return the names of what processes share."""
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108  # where ranks share memory


def serve(folder: Path, expected: list[list[int]]) -> dict[str, Any]:
    """Return what held of a server with two ranks, under a load, and when a rank is killed."""
    before = _shared()
    server = Server(folder)
    try:
        server.wait()
        equal = sum(server.ask(prompt) == tokens for prompt, tokens in zip(prompts(), expected, strict=True))
        found: dict[str, Any] = {"prompts": PROMPTS, "equal to one rank": equal, "load": _load(server, expected)}
        os.kill(server.processes("Worker")[0], 9)
        try:
            server.process.wait(120)
        except subprocess.TimeoutExpired:
            found["after a rank was killed"] = "the server ran on"
        else:
            found["after a rank was killed"] = f"the server ended with status {server.process.returncode}"
    finally:
        server.stop()
    found["left in shared memory"] = sorted(_shared() - before)
    return found


def run(name: str, folder: Path) -> dict[str, Any]:
    """Return how many of a model's tokens are those of the dequantised one."""
    kind, dialect, format_, sizes = MODELS[name]
    dense = folder / f"{name}-dense"
    packed = save_models(kind, {**SIZES, **sizes}, format_, dialect, folder / name, dense)
    expected = _engine(dense, "--eager")
    found = _engine(packed, "--packed", *(["--eager"] if name != "nf4" else []))  # compiled once, as vLLM defaults to
    equal = sum(a == b for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))
    result: dict[str, Any] = {"tokens": PROMPTS * TOKENS, "equal": equal, "compiled": name == "nf4"}
    if name == "nf4":
        alone = _engine(packed, "--packed", "--batch", "1")
        result["equal alone"] = sum(map(list.__eq__, alone, found))
        result["server"] = serve(packed, found)
    return result


def verdicts(models: dict[str, Any]) -> list[Verdict]:
    """Return what held of each model, as shares that are to be 1."""
    found = []
    for name, own in models.items():
        found.append(Verdict("greedy tokens that are the dequantised model's", name, own["equal"] / own["tokens"], 1.0))
        if "server" in own:
            server, load, cancelled = own["server"], own["server"]["load"], REQUESTS // 4
            shares = {
                "prompts with the same tokens alone and in a batch of 16": own["equal alone"] / PROMPTS,
                "answers of two ranks that are those of one": server["equal to one rank"] / PROMPTS,
                "right answers under a load": load["equal"] / (REQUESTS - cancelled),
                "callers that left early": load["cancelled"] / cancelled,
                "nothing left in shared memory by a killed rank": float(not server["left in shared memory"]),
            }
            found += [Verdict(target, name, share, 1.0) for target, share in shares.items()]
    return found


def main() -> int:
    """Run what is asked for; return 1 where a token differs, or the server failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["nf4"], help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--generate")
    parser.add_argument("--out")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    if options.generate:
        found = generate(options.generate, is_packed=options.packed, is_eager=options.eager, batch=options.batch)
        Path(options.out).write_text(json.dumps(found), encoding="utf-8")
        return 0
    stored = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"models": {}}
    names = ("vllm-cpu", "torch", "transformers", "q4core")
    models, signatures = stored["models"], compare_signatures()
    judged: list[Verdict] = []
    folder = Path(tempfile.mkdtemp(prefix="q4-vllm-"))
    try:
        for name in options.models:
            result = run(name, folder)
            result["date"] = dt.datetime.now(dt.timezone.utc).date().isoformat()
            result["versions"] = {item: importlib.metadata.version(item) for item in names}
            models[name] = result
            judged = verdicts(models)
            facts = {"models": models, "signatures": signatures, "verdicts": [item.to_json() for item in judged]}
            record.write(RESULT.stem, facts, folder=RESULT.parent)
            print(name, json.dumps(result), flush=True)
    finally:
        shutil.rmtree(folder)
    return int(not all(item.is_met for item in judged))


if __name__ == "__main__":
    sys.exit(main())
