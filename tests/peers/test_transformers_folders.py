"""Folders that transformers wrote: the same tokens, the same logits, the same answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

import q4core as q4
from q4_lm import Generation, LanguageModel, SentenceEncoder, TransformerEncoder, load_model, save_model
from tests.support.events import forget_warnings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln — 1234 €\n\n\tindented",
    "日本語 and emoji 🙂!",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")


def make_tokenizer(kind: str) -> Any:
    """Return a small trained tokenizer: byte-level, or pieces with byte fallback."""
    special = ["<s>", "</s>", "<pad>"]
    if kind == "byte":
        engine = tokenizers.Tokenizer(tokenizers.models.BPE())
        engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = tokenizers.decoders.ByteLevel()
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters)
        engine.train_from_iterator(TEXTS, trainer)
    else:
        engine = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))  # noqa: S106
        engine.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        engine.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("\u2581", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
            ]
        )
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=340, special_tokens=[*special, "<unk>", *bytes_])
        engine.train_from_iterator([text.replace(" ", "\u2581") for text in TEXTS[:1]], trainer)
        told = json.loads(engine.to_str())  # bytes are no special tokens
        told["added_tokens"] = [item for item in told["added_tokens"] if item["content"] not in bytes_]
        engine = tokenizers.Tokenizer.from_str(json.dumps(told))
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", engine.token_to_id("<s>"))]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names)
    made.chat_template = TEMPLATE
    return made


def save(folder: Path, kind: str = "byte", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Write a small random model with its tokenizer, and return both."""
    torch.manual_seed(4)
    tokenizer = make_tokenizer(kind)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference over the greatest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["byte", "pieces"])
def test_tokens_and_chats(kind: str, tmp_path: Path) -> None:
    """Texts have transformers' tokens and come back from them; a conversation has its template's tokens."""
    _, theirs = save(tmp_path, kind)
    with LanguageModel.open(tmp_path, EXACT) as model:
        for text in TEXTS:
            assert model.tokenizer.encode(text) == theirs(text).input_ids
            numbers = theirs(text, add_special_tokens=False).input_ids
            assert model.tokenizer.decode(numbers) == theirs.decode(numbers) == text
        messages = [{"role": "user", "content": TEXTS[0]}]
        chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert model.chat(messages) == chat
        assert model.tokenizer.stops == {theirs.eos_token_id}


def test_answers(tmp_path: Path) -> None:
    """Logits of a prompt and the greedy answer to it are transformers' own."""
    theirs, tokenizer = save(tmp_path)
    prompt = tokenizer(TEXTS[0]).input_ids
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=2)
    with LanguageModel.open(tmp_path, EXACT) as model, torch.inference_mode():
        assert error(model.decoder(torch.tensor([prompt])), expected) < 1e-6
        found = [*Generation(model.decoder, prompt, max_tokens=20, stops=model.tokenizer.stops)]
    assert found == [token for token in answer[0, len(prompt) :].tolist() if token != 1]


def test_packed_folder(tmp_path: Path) -> None:
    """A folder whose matrices are packed gives the logits of transformers' model with the same numbers unpacked."""
    theirs, tokenizer = save(tmp_path)
    linears = {
        name: item for name, item in theirs.named_modules() if isinstance(item, torch.nn.Linear) and name != "lm_head"
    }
    packed = {name: q4.quantize(item.weight.detach(), format="nvfp4") for name, item in linears.items()}
    dense = {name: value for name, value in theirs.state_dict().items() if name.removesuffix(".weight") not in packed}
    del dense["lm_head.weight"]
    (tmp_path / "model.safetensors").unlink()
    q4.save_checkpoint(tmp_path / "model.safetensors", packed, dialect="modelopt-nvfp4", dense=dense)
    with torch.no_grad():
        for name, item in linears.items():
            item.weight.copy_(q4.dequantize(packed[name], torch.float32))
        tokens = torch.tensor([tokenizer(TEXTS[0]).input_ids])
        expected = theirs(tokens).logits
    with LanguageModel.open(tmp_path, EXACT) as model, torch.inference_mode():
        assert error(model.decoder(tokens), expected) < 1e-5
        assert len(model.session.layers()) == 2 * 7
        cache = model.decoder.make_cache(tokens.shape[1])
        pieces = [model.decoder(piece, cache) for piece in tokens.split([4, 1, tokens.shape[1] - 5], 1)]
        assert error(torch.cat(pieces, 1), expected) < 1e-5


def test_encoder_folder(tmp_path: Path) -> None:
    """A folder of an encoder is read as one, and gives no text."""
    torch.manual_seed(4)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    theirs = transformers.BertModel(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 50, (2, 7))
    with q4.Session(EXACT) as session, torch.inference_mode():
        model = load_model(tmp_path, session)
        assert isinstance(model, TransformerEncoder)
        assert error(model(tokens), theirs(tokens).last_hidden_state) < 1e-6
    make_tokenizer("byte").save_pretrained(tmp_path)
    with pytest.raises(q4.CheckpointError, match="an encoder gives no text"):
        LanguageModel.open(tmp_path, EXACT)


def write_sentence_encoder(folder: Path) -> tuple[Any, Any]:
    """Write a small random encoder as sentence-transformers lays it out, and return model and tokenizer."""
    torch.manual_seed(4)
    words = sorted({*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), "the"})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    engine.normalizer = tokenizers.normalizers.BertNormalizer()
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    marks = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "CLS", "SEP", "UNK")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **marks)
    tokenizer.save_pretrained(folder)
    engine.enable_padding(length=128, pad_id=0, pad_token="[PAD]")  # noqa: S106  # as MiniLM's file has it
    engine.enable_truncation(128)
    engine.save(str(folder / "tokenizer.json"))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=48,
        initializer_range=0.3,
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    return model, tokenizer


SENTENCES = ["the cat", "a much longer sentence of some words that goes on and on", "Q", "the dog sat"]


@pytest.mark.parametrize("pooling", ["mean", "cls", None])
def test_sentences(pooling: str | None, tmp_path: Path) -> None:
    """Vectors are those of the layout's rule, whatever padding the tokenizer's file asks for; long texts are cut."""
    theirs, tokenizer = write_sentence_encoder(tmp_path)
    if pooling is not None:
        (tmp_path / "1_Pooling").mkdir()
        told = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(told))
    given = tokenizer(SENTENCES, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.inference_mode(), SentenceEncoder.open(tmp_path, EXACT) as model:
        features = theirs(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
        expected = features[:, 0] if pooling == "cls" else (features * mask).sum(1) / mask.sum(1)
        found = model.encode(SENTENCES)
        # float32 sums in batches of other lengths than theirs; a counted padding is off by 1
        assert error(found, torch.nn.functional.normalize(expected, dim=-1)) < 1e-5
        assert error(model.encode(SENTENCES, batch=1), found) < 1e-5


def test_pooling_that_is_not_served(tmp_path: Path) -> None:
    """A layout whose vectors are made in another way is refused."""
    write_sentence_encoder(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_median_tokens": true}')
    with pytest.raises(q4.CheckpointError, match="pooling_mode must be among cls, max, mean"):
        SentenceEncoder.open(tmp_path, EXACT)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("config.json", None, "present"),
        ("config.json", "[1]", "an object, as config.json"),
        ("config.json", '{"model_type": "lama"}', "Did you mean 'llama'"),
        ("tokenizer.json", None, "Only fast tokenizers"),
        ("tokenizer.json", "{}", "a file that the package tokenizers reads"),
    ],
)
def test_bad_folders(name: str, text: str | None, rule: str, tmp_path: Path) -> None:
    """A file that is missing or malformed, or a kind of model that is not served, is named with a hint."""
    save(tmp_path)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(q4.CheckpointError, match=rule):
        LanguageModel.open(tmp_path, EXACT)


def test_weights_of_another_model(tmp_path: Path) -> None:
    """A checkpoint with a tensor too few, too many, or of another shape names the tensor and the folder."""
    theirs, _ = save(tmp_path)
    for change in ("fewer", "more", "shape"):
        state = {name: value.contiguous() for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
        if change == "fewer":
            del state["model.layers.1.mlp.up_proj.weight"]
        elif change == "more":
            state["model.layers.1.mlp.gate.weight"] = torch.zeros(3, 64)
        else:
            state["model.norm.weight"] = torch.zeros(63)
        from safetensors.torch import save_file  # noqa: PLC0415  # here alone

        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        named = {"fewer": "up_proj", "more": "mlp.gate", "shape": "model.norm"}[change]
        with pytest.raises(q4.CheckpointError, match=named) as caught:
            LanguageModel.open(tmp_path, EXACT)
        assert caught.value.where == str(tmp_path)


def change_head(folder: Path, change: Any) -> None:
    """Write a folder's tensors again after a function changed them."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS = {
    "another": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).contiguous()}),
    "the same": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "alone": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
}


@pytest.mark.filterwarnings("ignore:the head of")
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_its_own_in_a_tied_model(kind: str, tmp_path: Path) -> None:
    """Where the config ties and the file holds a head: transformers' logits, which are the head's where it differs."""
    save(tmp_path)
    change_head(tmp_path, HEADS[kind])
    tokens = torch.arange(3, 40)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode(), q4.Session(EXACT) as session:
        ours: Any = load_model(tmp_path, session)
        assert error(ours(tokens), theirs(tokens).logits) < 1e-6
    assert ours.config.tie_word_embeddings is (kind != "another")


def test_a_head_of_its_own_is_reported(tmp_path: Path) -> None:
    """A head that the config denies is a warning; saved and loaded again it is still there."""
    save(tmp_path)
    change_head(tmp_path, HEADS["another"])
    forget_warnings()
    with q4.Session(EXACT) as session, torch.inference_mode():
        with pytest.warns(q4.Q4Warning, match=r"tie_word_embeddings.*not those of the embedding"):
            model: Any = load_model(tmp_path, session)
        save_model(model, tmp_path / "ours")
        again: Any = load_model(tmp_path / "ours", session)
        assert torch.equal(again(torch.arange(5)[None]), model(torch.arange(5)[None]))
