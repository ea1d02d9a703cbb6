"""Text and chats become the ids that the reference tokenizers give; special tokens once, end tokens known."""

import datetime
import gzip
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from checkpoints import edit_json, save_folder, save_gguf, smollm2
from tokenizers import models, pre_tokenizers, processors

from specjax.loading.target import open_checkpoint
from specjax.loading.tokenizer import load_tokenizer

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|user|>",
    "a",
    "b",
    "c",
    "system",
    "user",
    "assistant",
    ":",
    "1",
    "2",
]
CHAT = "{{ bos_token }}{% for m in messages %}{{ '<|user|>' + m['content'] + eos_token }}{% endfor %}"
HELLO = [{"role": "user", "content": "a b"}]


def write_tokenizer(folder: Path, *, adds_bos: bool = False, **fields) -> Path:
    """A word-level tokenizer; `adds_bos`: its post-processor writes <s> first; `fields` of its config."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<|user|>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | fields))
    return folder


def checkpoint_at(path: Path, vocab_size: int = 97, end_ids: tuple[int, ...] = (2,)):
    """As much of a checkpoint as the tokenizer looks at."""
    return SimpleNamespace(path=path, config=SimpleNamespace(vocab_size=vocab_size), end_ids=end_ids)


def load(folder: Path, **options):
    return load_tokenizer(checkpoint_at(folder), **options)


# The default target against the reference tokenizer


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(smollm2())


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("SPECJAX_DATA")
    if folder is None:
        pytest.skip("SPECJAX_DATA does not name the folder with tokenizer/ and train/")
    return Path(folder)


@pytest.fixture(scope="module")
def prompts(data) -> list[str]:
    with gzip.open(data / "train" / "train_prompts.jsonl.gz", "rt") as lines:
        return [json.loads(line)["turns"][0] for line in itertools.islice(lines, 1000)]


def test_ids_equal_the_reference_tokenizer_on_the_projects_own_prompts(smollm):
    """What a reference tokenizer.json made of beginnings of the benchmark's prompts: stands in for the data folder."""
    rows = [json.loads(line) for line in (Path(__file__).parent / "fixtures" / "tokenizer_ids.jsonl").open()]
    assert len(rows) > 30
    for row in rows:
        assert smollm.encode(row["text"]) == row["ids"]


def test_ids_equal_the_reference_tokenizer(smollm, data, prompts):
    reference = tokenizers.Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    assert smollm.tokens() == [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    for prompt in [
        *prompts,
        "",
        " ",
        "2024  1,000\n\n\t3.14",
        "<|im_start|>x<|im_end|>",
        "<|im_start|><|im_start|>",
        "naïve 日本語 🙂",
    ]:
        ids = smollm.encode(prompt)
        assert ids == reference.encode(prompt).ids
        assert smollm.decode(ids, skip_special=False) == prompt


def test_folder_and_gguf_tokenizers_agree(smollm, data):
    other = load_tokenizer(smollm2(), data / "tokenizer" / "tokenizer.json")
    assert other.fingerprint == smollm.fingerprint
    assert (other.end_ids, other.pad_id, other.vocab_size) == (
        smollm.end_ids,
        smollm.pad_id,
        smollm.vocab_size,
    )
    assert (smollm.end_ids, smollm.vocab_size) == ((2,), 49152)
    assert other.render(HELLO) == smollm.render(HELLO)


def test_chat_ids_equal_transformers(smollm, data, prompts):
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra: pip install transformers")
    settings = json.loads((data / "tokenizer" / "tokenizer_config.json").read_text())
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer" / "tokenizer.json"),
        bos_token=settings["bos_token"],
        eos_token=settings["eos_token"],
    )
    for first, second in zip(prompts[:40], prompts[40:80], strict=True):
        for messages in (
            [{"role": "user", "content": first}],
            [{"role": "system", "content": second}, {"role": "user", "content": first}],
            [
                {"role": "user", "content": first},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": second},
            ],
        ):
            want = reference.apply_chat_template(
                messages,
                chat_template=settings["chat_template"],
                add_generation_prompt=True,
                return_dict=False,
            )
            assert smollm.encode_chat(messages) == want


# Special tokens


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("setting", [None, False, True])
def test_beginning_token_is_there_once(tmp_path, adds_bos, setting):
    fields = {} if setting is None else {"add_bos_token": setting}
    tokenizer = load(write_tokenizer(tmp_path, adds_bos=adds_bos, chat_template=CHAT, **fields))
    begins = adds_bos if setting is None else setting
    assert tokenizer.encode("a b") == [1] * begins + [5, 6]
    if begins:
        assert tokenizer.encode("<s>a b") == [1, 5, 6]
    assert tokenizer.encode_chat(HELLO) == [1, 4, 5, 6, 2]


def test_end_token_setting(tmp_path):
    assert load(write_tokenizer(tmp_path, add_eos_token=True)).encode("a") == [5, 2]


def test_special_text_in_a_message_becomes_the_token(tmp_path):
    tokenizer = load(write_tokenizer(tmp_path, chat_template=CHAT))
    assert tokenizer.encode_chat([{"role": "user", "content": "a </s>"}]) == [1, 4, 5, 2, 2]


def test_decode(tmp_path):
    tokenizer = load(write_tokenizer(tmp_path))
    assert tokenizer.decode([1, 5, 6, 2]) == "a b"
    assert tokenizer.decode([1, 5, 6, 2], skip_special=False) == "<s> a b </s>"


def test_end_ids_are_the_union_of_all_files(tmp_path):
    folder = write_tokenizer(save_folder(tmp_path / "tiny"))
    edit_json(folder / "config.json", {"eos_token_id": 5})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_tokenizer(open_checkpoint(folder)).end_ids == (2, 5, 7, 9)
    edit_json(folder / "generation_config.json", {"eos_token_id": 97})
    with pytest.raises(ValueError, match="end token id 97 .* outside the vocabulary of 97 tokens"):
        load_tokenizer(open_checkpoint(folder))


def test_pad_id(tmp_path):
    assert load(write_tokenizer(tmp_path)).pad_id == 2  # the first end token
    assert load(write_tokenizer(tmp_path, pad_token="<pad>")).pad_id == 3


def test_fingerprint_is_about_content(tmp_path):
    folder = write_tokenizer(tmp_path)
    before = load(folder).fingerprint
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {"a": 6, "b": 5}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    swapped = load(folder)
    assert swapped.fingerprint != before and swapped.vocab_size == len(WORDS)


# Chat templates


def test_template_sources(tmp_path):
    folder = write_tokenizer(
        tmp_path, chat_template=[{"name": "rag", "template": "x"}, {"name": "default", "template": "1"}]
    )
    assert load(folder).render(HELLO) == "1"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "2"}))
    assert load(folder).render(HELLO) == "2"
    (folder / "chat_template.jinja").write_text("3")
    assert load(folder).render(HELLO) == "3"
    assert load(folder).has_chat_template


def test_template_features(tmp_path):
    template = (
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{%- endfor %}|{{ strftime_now('%d %b %Y') }}|{{ mode }}|{{ tools is none }}"
        "|{{ add_generation_prompt }}"
    )
    folder = write_tokenizer(tmp_path, chat_template=template)
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "<é>"}]
    assert load(folder).render(messages, {"mode": "fast"}) == '"<é>"|01 Jan 2025|fast|True|True'
    tokenizer = load(folder, date=datetime.datetime(2026, 2, 3))
    assert tokenizer.render(messages, add_generation_prompt=False) == '"<é>"|03 Feb 2026||True|False'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_template_errors_are_one_sentence(tmp_path, template, message):
    tokenizer = load(write_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=rf"does not take these messages \(roles: user\): .*{message}") as error:
        tokenizer.render(HELLO)
    assert "\n" not in str(error.value)


def test_no_template(tmp_path):
    tokenizer = load(write_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.encode_chat(HELLO)


# Refused


def test_refused_at_the_door(tmp_path):
    folder = write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="has 14 tokens but the model only 13"):
        load_tokenizer(checkpoint_at(folder, vocab_size=13))
    edit_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(ValueError, match="eos_token '<end>' .* is not in its vocabulary"):
        load(folder)
    edit_json(
        folder / "tokenizer_config.json",
        {"eos_token": None, "chat_template": [{"name": "rag", "template": "x"}]},
    )
    with pytest.raises(ValueError, match="chat templates rag but none named default"):
        load(folder)
    added = {"added_tokens_decoder": {"14": {"content": "<new>"}}, "chat_template": None}
    edit_json(folder / "tokenizer_config.json", added)
    with pytest.raises(ValueError, match="added token '<new>' with id 14"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no valid tokenizer"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        load(folder)


def test_gguf_with_another_pre_tokenizer_needs_a_tokenizer_json(tmp_path):
    folder = save_folder(tmp_path / "tiny")
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "from the GGUF file {{ eos_token }}",
    }
    checkpoint = open_checkpoint(save_gguf(tmp_path / "model.gguf", folder, metadata=metadata))
    with pytest.raises(ValueError, match="pre-tokenizer 'llama-bpe'; give the model's tokenizer.json"):
        load_tokenizer(checkpoint)
    assert load_tokenizer(checkpoint, write_tokenizer(tmp_path)).encode("a b") == [5, 6]
    (tmp_path / "tokenizer_config.json").unlink()
    alone = load_tokenizer(checkpoint, tmp_path / "tokenizer.json")
    assert (alone.render(HELLO), alone.encode("b"), alone.end_ids) == (
        "from the GGUF file </s>",
        [1, 6],
        (2,),
    )
