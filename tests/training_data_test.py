"""Training data: only what the assistant wrote is supervised, and every row that is left out is counted."""

import collections
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from checkpoints import smollm2
from tokenizer_test import checkpoint_at
from tokenizers import decoders, models, pre_tokenizers

from specjax.loading.tokenizer import Tokenizer, load_tokenizer
from train_drafts import data
from train_drafts.data import Example

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
END = 1
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: only the last answer keeps its thinking.
FORGETS_THINKING = CHATML.replace(
    "m.content +",
    "(m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1]) +",
)
# Answers are written under another heading than the one that asks for them.
UNMASKABLE = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>bot\n'")
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

CONVERSATION = [
    {"role": "system", "content": "SYSTEM be brief"},
    {"role": "user", "content": "USER one?"},
    {"role": "assistant", "content": "First answer, näïve 🙂."},
    {"role": "user", "content": "USER two?\n"},
    {"role": "assistant", "content": "Second answer.\n"},
]


def byte_tokenizer(folder: Path, template: str) -> Tokenizer:
    """Four special tokens, all bytes, and one merge: two line breaks."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(checkpoint_at(folder, vocab_size=300, end_ids=(END,)))


@pytest.fixture
def chatml(tmp_path) -> Tokenizer:
    return byte_tokenizer(tmp_path, CHATML)


@pytest.fixture(params=["bytes", "smollm2"])
def tokenizer(request, tmp_path) -> Tokenizer:
    """The tiny tokenizer, and the default target's own with its own template."""
    return byte_tokenizer(tmp_path, CHATML) if request.param == "bytes" else load_tokenizer(smollm2())


def write(folder: Path, *rows, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def spans(example: Example) -> list[tuple[int, int]]:
    """Runs of supervised tokens: (first, one past the last)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def texts(example: Example, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(example.ids[a:b].tolist(), skip_special=False) for a, b in spans(example)]


# Masks


def test_exactly_the_answers_and_their_end_tokens_are_supervised(tokenizer, tmp_path):
    (example,), report = data.load(write(tmp_path, {"messages": CONVERSATION}), tokenizer, max_tokens=1000)
    assert texts(example, tokenizer) == ["First answer, näïve 🙂.<|im_end|>", "Second answer.\n<|im_end|>"]
    whole = tokenizer.render(CONVERSATION, add_generation_prompt=False)
    assert tokenizer.decode(example.ids.tolist(), skip_special=False) == whole
    for (start, _), turn in zip(spans(example), (2, 4), strict=True):
        assert example.ids[:start].tolist() == tokenizer.encode_chat(CONVERSATION[:turn])
    assert (example.ids.dtype, example.mask.dtype, example.source) == (np.int32, np.bool_, "rows.jsonl:1")
    assert (report.tokens, report.supervised) == (len(example.ids), example.mask.sum())


def test_ids_equal_one_rendering_by_transformers(chatml, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra: pip install transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    want = reference.apply_chat_template(CONVERSATION, chat_template=CHATML, return_dict=False)
    (example,), _ = data.load(write(tmp_path, {"messages": CONVERSATION}), chatml, max_tokens=1000)
    assert example.ids.tolist() == want


def test_a_template_that_rewrites_history_gives_one_example_per_answer(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, FORGETS_THINKING)
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "<think>hm</think>First."},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>well</think>Second."},
    ]
    examples, report = data.load(write(tmp_path, {"messages": messages}), tokenizer, max_tokens=1000)
    assert [texts(example, tokenizer) for example in examples] == [
        ["<think>hm</think>First.<|im_end|>"],
        ["<think>well</think>Second.<|im_end|>"],
    ]
    for example, turn in zip(examples, (1, 3), strict=True):
        assert example.ids[: spans(example)[0][0]].tolist() == tokenizer.encode_chat(messages[:turn])
    assert (report.rows, report.examples) == (1, 2)


def test_a_template_that_cannot_be_masked_is_refused(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, UNMASKABLE)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template of .* cannot be masked; let the target"):
        data.load(write(tmp_path, {"messages": CONVERSATION}), tokenizer, max_tokens=1000)


def test_without_an_end_token_the_answer_ends_before_white_space(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, NO_END)
    (example,), _ = data.load(write(tmp_path, {"messages": CONVERSATION}), tokenizer, max_tokens=1000)
    assert texts(example, tokenizer) == [" First answer, näïve 🙂.", " Second answer."]


def test_an_end_token_within_an_answer_ends_it(chatml, tmp_path):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes<|im_end|>no"}]
    (example,), _ = data.load(write(tmp_path, {"messages": messages}), chatml, max_tokens=1000)
    assert texts(example, chatml) == ["yes<|im_end|>"]


def test_an_answer_whose_first_token_began_in_the_prompt_is_left_out(chatml, tmp_path):
    merged = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n\nyes"}]
    path = write(tmp_path, {"messages": merged}, {"messages": CONVERSATION})
    _, report = data.load(path, chatml, max_tokens=1000)
    assert report.dropped == {"a token spans a prompt and its answer": 1}


def test_template_arguments_reach_both_renderings(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "{{ mode }}" + CHATML)
    path = write(tmp_path, {"messages": CONVERSATION})
    (example,), _ = data.load(path, tokenizer, max_tokens=1000, template_args={"mode": "fast"})
    assert tokenizer.decode(example.ids.tolist()).startswith("fast")


# Rows that are left out


def turns(*contents, first: str = "user") -> dict:
    other = {"user": "assistant", "assistant": "user"}
    roles = [first if i % 2 == 0 else other[first] for i in range(len(contents))]
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents)]}


def test_rows_that_teach_nothing_are_dropped_and_counted(chatml, tmp_path):
    user = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    rows = [
        turns("hello", "hi"),
        {"messages": []},
        turns("hello"),
        turns("hi", first="assistant"),
        {"messages": [user, user, answer]},
        turns("hello", " "),
        turns("x" * 200, "hi"),
        turns([{"type": "image"}], "hi"),
        turns("\ud800", "hi"),
        {"messages": [user, answer, answer]},
        {"messages": [user, answer, {"role": "system", "content": "c"}]},
        {"messages": [{"role": "system", "content": "c"}]},
        {"messages": [{"role": "tool", "content": "c"}]},
        {"prompt_ids": [5], "response_ids": [5, 999]},
    ]
    examples, report = data.load(write(tmp_path, *rows), chatml, max_tokens=64)
    assert [texts(example, chatml) for example in examples] == [["hi<|im_end|>"]]
    assert report.dropped == {
        "no messages": 1,
        "no assistant text": 2,
        "starts with the assistant": 1,
        "two user turns in a row": 1,
        "empty assistant text": 1,
        "prompt alone fills 64 tokens": 1,
        "non-text content": 2,
        "two assistant turns in a row": 1,
        "a system message after the first": 1,
        "a role other than system, user and assistant": 1,
        "ids outside the vocabulary": 1,
    }
    assert report.rows == len(rows) == report.examples + sum(report.dropped.values())


def test_a_long_text_is_cut_at_the_end_and_counted(chatml, tmp_path):
    path = write(tmp_path, turns("hello", "x" * 100), turns("hello", "hi"))
    (long, short), report = data.load(path, chatml, max_tokens=64)
    assert (len(long.ids), report.cut, report.examples) == (64, 1, 2)
    assert set(texts(long, chatml)[0]) == {"x"} and len(short.ids) < 64


def test_user_turns_after_the_last_answer_are_left_out(chatml, tmp_path):
    (more, plain), _ = data.load(write(tmp_path, turns("a", "b", "c"), turns("a", "b")), chatml, max_tokens=64)
    assert more.ids.tolist() == plain.ids.tolist()


def test_a_file_with_nothing_or_everything_supervised_is_refused(chatml, tmp_path):
    with pytest.raises(ValueError, match="nothing to train on: 2 rows, dropped: 1 no messages, 1 no assistant text;"):
        data.load(write(tmp_path, {"messages": None}, turns("a")), chatml, max_tokens=64)
    with pytest.raises(ValueError, match="nothing to train on: 0 rows, dropped: none"):
        data.load(write(tmp_path), chatml, max_tokens=64)
    with pytest.raises(ValueError, match="all 2 tokens .* are supervised"):
        data.load(write(tmp_path, {"prompt_ids": [], "response_ids": [7, 8]}), chatml, max_tokens=64)


# Files


def test_distilled_rows_are_used_as_they_are(chatml, tmp_path):
    row = {"prompt_ids": [9, 9, 0], "response_ids": [8, 7, END], "finish": "stop", "messages": CONVERSATION}
    cut_short = {"prompt_ids": [4], "response_ids": [5, 6], "finish": "length"}
    write(tmp_path / "out", cut_short, name="shards/00001.jsonl")
    write(tmp_path / "out", row, name="shards/00000.jsonl")
    examples, report = data.load(tmp_path / "out", chatml, max_tokens=64)
    assert [example.ids.tolist() for example in examples] == [[9, 9, 0, 8, 7, END], [4, 5, 6]]
    assert [example.mask.tolist() for example in examples] == [[False] * 3 + [True] * 3, [False, True, True]]
    assert [example.source for example in examples] == ["00000.jsonl:1", "00001.jsonl:1"]
    assert report.finishes == {"stop": 1, "length": 1} and not report.user_written
    assert report.mask_ratio == 5 / 9


def test_layouts_and_containers_agree(chatml, tmp_path):
    sharegpt = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = {"conversations": [{"from": sharegpt[m["role"]], "value": m["content"]} for m in CONVERSATION]}
    openai = {"messages": CONVERSATION}
    paths = [write(tmp_path, openai), write(tmp_path, shared, name="shared.jsonl")]
    paths.append(write(tmp_path, json.dumps([openai], indent=1), name="rows.json"))
    for path in tuple(paths[1:]):
        paths.append(path.with_name(path.name + ".gz"))
        paths[-1].write_bytes(gzip.compress(path.read_bytes()))
    prints = {data.fingerprint(data.load(path, chatml, max_tokens=1000)[0]) for path in paths}
    assert len(prints) == 1 and len(prints.pop()) == 16


def test_the_report_reads_well_and_says_who_wrote_the_answers(chatml, tmp_path):
    _, report = data.load(write(tmp_path, turns("hello", "x" * 100), turns("a")), chatml, max_tokens=64)
    assert report.lines() == [
        "1 examples from 2 rows; dropped: 1 no assistant text.",
        f"{report.supervised} of 64 tokens are supervised ({report.supervised / 64:.1%}).",
        "1 examples were cut at the end to the longest length.",
        "these answers were not written by the target; regenerate them with python -m launch.distill for a better "
        "draft",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: a row must be a JSON object, got list"),
        ('{"text": "a"}', "rows.jsonl:2: unknown layout with the keys text"),
        ('{"messages": "a"}', "rows.jsonl:2: messages must be a list of objects"),
        ('{"prompt_ids": [1], "response_ids": ["a"]}', "rows.jsonl:2: response_ids must be a list of integers"),
    ],
)
def test_malformed_rows_are_refused_by_file_and_line(chatml, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        data.load(write(tmp_path, turns("a", "b"), row), chatml, max_tokens=64)


def test_missing_and_broken_files_are_refused(chatml, tmp_path):
    with pytest.raises(FileNotFoundError, match="none.jsonl does not exist"):
        data.load(tmp_path / "none.jsonl", chatml, max_tokens=64)
    with pytest.raises(FileNotFoundError, match="has no shards"):
        data.load(tmp_path, chatml, max_tokens=64)
    with pytest.raises(ValueError, match="must hold an array"):
        data.load(write(tmp_path, turns("a", "b"), name="rows.json"), chatml, max_tokens=64)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"messages": []}' * 99)[:-9])
    with pytest.raises(ValueError, match="cannot be read"):
        data.load(tmp_path / "rows.jsonl.gz", chatml, max_tokens=64)


def test_the_projects_own_distilled_file():
    folder = os.environ.get("SPECJAX_DATA")
    if folder is None:
        pytest.skip("SPECJAX_DATA does not name the folder with tokenizer/ and train/")
    path = Path(folder) / "train" / "selfdistilled_smollm2_135m.jsonl.gz"
    examples, report = data.load(path, load_tokenizer(smollm2()), max_tokens=8192)
    assert (report.rows, report.examples, report.supervised) == (1471, 1471, 159_840)
    assert not report.dropped and sum(report.finishes.values()) == len(examples)


# What is made of examples


def made(ids, mask) -> Example:
    return Example(np.array(ids, np.int32), np.array(mask, np.bool_), "")


def test_fingerprint_depends_on_ids_masks_and_borders():
    variants = [
        [made([1, 2, 3], [0, 1, 1])],
        [made([1, 2, 4], [0, 1, 1])],
        [made([1, 2, 3], [0, 0, 1])],
        [made([1, 2], [0, 1]), made([3], [1])],
        [made([3], [1]), made([1, 2], [0, 1])],
    ]
    assert len({data.fingerprint(examples) for examples in variants}) == len(variants)
    assert data.fingerprint(variants[0]) == data.fingerprint([Example(*variants[0][0].__dict__.values())])


def test_draft_vocabulary_holds_the_most_frequent_supervised_ids():
    rng = np.random.default_rng(0)
    examples = [made(rng.zipf(1.3, 200) % 60, rng.random(200) < 0.5) for _ in range(5)]
    counts = collections.Counter(int(i) for e in examples for i in e.ids[e.mask])
    ranked = sorted(range(100), key=lambda i: (i != 99, -counts[i], i))  # 99 is the end token, never seen
    for size in (1, 10, 50, 90):
        chosen = data.draft_vocabulary(examples, size, [99], 100)
        assert chosen.dtype == np.int32 and chosen.tolist() == sorted(ranked[:size])
        covered = sum(counts[i] for i in chosen.tolist()) / counts.total()
        assert data.coverage(examples, chosen) == pytest.approx(covered)
    for size in (0, 101):
        with pytest.raises(ValueError, match=f"vocabulary of {size} tokens does not fit"):
            data.draft_vocabulary(examples, size, [99], 100)
    with pytest.raises(ValueError, match="only 20; use its tokenizer"):
        data.draft_vocabulary(examples, 10, [2], 20)
