"""Guards the packaged benchmark prompts and the readers for other prompt files."""

import collections
import gzip
import json
import os
import pathlib
import re

import pytest
from checkpoints import smollm2

from specjax.bench import workloads
from specjax.loading.tokenizer import load_tokenizer

DATA = pathlib.Path(os.environ["SPECJAX_DATA"]) if os.environ.get("SPECJAX_DATA") else None
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello. How can I help?"},
    {"role": "user", "content": "Name a river."},
]


def data_file(name):
    """The path of a file in the data folder; skips the test where it is absent."""
    if DATA is None:
        pytest.skip("SPECJAX_DATA does not name a data folder")
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


def write_jsonl(path, *rows):
    """Write rows, one a line, and return the path as text; a row that is a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def error_of(name, limit=None):
    """The message of the error that loading raises."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        workloads.load(name, limit)
    message = str(caught.value)
    assert "\n" not in message, "an error is one sentence"
    return message


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workload_has_at_least_ten_prompts_of_its_own_task(name):
    prompts = workloads.load(name)
    assert len(prompts) >= 10
    assert {prompt.task for prompt in prompts} == {name}
    assert {prompt.history for prompt in prompts} == {()}


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_number_of_turns_fits_the_workload(name):
    counts = {len(prompt.turns) for prompt in workloads.load(name)}
    assert counts == ({2, 3} if name == "multi_turn" else {1})


def test_ids_and_texts_are_unique_over_all_workloads():
    prompts = workloads.load("all")
    assert list(dict.fromkeys(prompt.task for prompt in prompts)) == list(workloads.WORKLOADS)
    for values in ([prompt.id for prompt in prompts], [turn for prompt in prompts for turn in prompt.turns]):
        assert [value for value, count in collections.Counter(values).items() if count > 1] == []


def test_packaged_prompts_hold_no_repeated_filler():
    sentences = collections.Counter(
        sentence.strip()
        for prompt in workloads.load("long_doc_qa,summarization,rag")
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(prompt.turns))
        if len(sentence) > 60
    )
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def token_lengths(name):
    """The number of tokens of each prompt of a workload, all of its turns together."""
    tokenizer = load_tokenizer(smollm2())
    return [sum(len(tokenizer.encode(turn)) for turn in prompt.turns) for prompt in workloads.load(name)]


def test_token_lengths_run_from_a_dozen_to_three_thousand():
    lengths = token_lengths("all")
    assert min(lengths) <= 20
    assert 2500 <= max(lengths) <= 3500


@pytest.mark.parametrize(
    ("name", "low", "high"), [("long_doc_qa", 1000, 3000), ("rag", 300, 900), ("summarization", 250, 900)]
)
def test_token_lengths_of_long_workloads_stay_in_their_range(name, low, high):
    lengths = token_lengths(name)
    assert low <= min(lengths) and max(lengths) <= high


def test_several_names_are_loaded_in_order_and_once():
    prompts = workloads.load("qa, chat,qa")
    assert list(dict.fromkeys(prompt.task for prompt in prompts)) == ["qa", "chat"]
    assert len(prompts) == len(workloads.load("qa")) + len(workloads.load("chat"))


def test_limit_keeps_the_first_prompts_of_each_task():
    prompts = workloads.load("all", limit=2)
    assert [prompt.id for prompt in prompts] == [
        f"{name}-{number:03d}" for name in workloads.WORKLOADS for number in (0, 1)
    ]


def test_limit_counts_tasks_of_a_mixed_file_apart(tmp_path):
    rows = [{"id": f"{i}", "task": "ab"[i % 2], "turns": [f"text {i}"]} for i in range(6)]
    prompts = workloads.load(write_jsonl(tmp_path / "mixed.jsonl", *rows), limit=2)
    assert [prompt.id for prompt in prompts] == ["0", "1", "2", "3"]


def test_limit_below_one_is_refused():
    assert "limit must be at least 1" in error_of("chat", limit=0)


ONE_TURN = {
    "suite12": {"id": "r", "task": "t", "turns": ["Name a river."]},
    "spec_bench": {"question_id": "r", "category": "t", "turns": ["Name a river."]},
    "openai": {"id": "r", "task": "t", "messages": CHAT[3:]},
    "sharegpt": {"id": "r", "task": "t", "conversations": [{"from": "human", "value": "Name a river."}]},
    "prompt": {"id": "r", "task": "t", "prompt": "Name a river."},
    "text": {"id": "r", "task": "t", "text": "Name a river."},
}


@pytest.mark.parametrize("row", ONE_TURN.values(), ids=ONE_TURN)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "json.gz"])
def test_every_layout_is_read_alike_in_every_kind_of_file(tmp_path, row, ending):
    path = tmp_path / f"prompts.{ending}"
    text = json.dumps([row], indent=1) if "jsonl" not in ending else json.dumps(row) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    assert workloads.load(str(path)) == [workloads.Prompt("r", "t", ("Name a river.",))]


@pytest.mark.parametrize("answer", [[], [{"role": "assistant", "content": "The Elbe."}]])
def test_openai_and_sharegpt_split_at_the_last_user_message(tmp_path, answer):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    messages = CHAT + answer
    conversations = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    path = write_jsonl(tmp_path / "talk.jsonl", {"messages": messages}, {"conversations": conversations})
    assert workloads.load(path) == [
        workloads.Prompt("talk-000", "talk", ("Name a river.",), tuple(CHAT[:3])),
        workloads.Prompt("talk-001", "talk", ("Name a river.",), tuple(CHAT[:3])),
    ]


def test_history_next_to_turns_is_kept(tmp_path):
    path = write_jsonl(tmp_path / "h.jsonl", {"task": "t", "turns": ["And then?"], "history": CHAT[:3]})
    assert workloads.load(path) == [workloads.Prompt("t-000", "t", ("And then?",), tuple(CHAT[:3]))]


def test_rows_of_different_layouts_may_share_a_file_and_integer_ids_become_text(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", {"question_id": 81, "turns": ["a", "b"]}, "", {"text": "c"})
    assert workloads.load(path) == [
        workloads.Prompt("81", "m", ("a", "b")),
        workloads.Prompt("m-001", "m", ("c",)),
    ]


def test_blank_system_prompt_byte_order_mark_and_unusual_line_separators_are_read(tmp_path):
    path = tmp_path / "odd.jsonl"
    row = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a\u2028b"}]}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert workloads.load(str(path))[0].turns == ("a\u2028b",)


@pytest.mark.parametrize(("name", "rows"), [("suite12_dev.jsonl", 480), ("spec_bench_question.jsonl", 298)])
def test_public_suites_load_whole(name, rows):
    prompts = workloads.load(str(data_file(f"bench/{name}")))
    assert len(prompts) == rows
    assert len({prompt.id for prompt in prompts}) == rows


def test_unknown_workload_names_the_nearest_and_the_choices():
    message = error_of("chat,summarisation")
    assert "'summarisation'" in message and "did you mean 'summarization'?" in message
    assert all(name in message for name in workloads.WORKLOADS) and ".jsonl" in message
    assert "did you mean" not in error_of("xyz")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json.gz", "folder/prompts"])
def test_missing_file_is_named(tmp_path, name):
    path = str(tmp_path / name)
    assert error_of(path) == f"{path} does not exist; check the path"


def test_unreadable_files_say_why(tmp_path):
    (tmp_path / "plain.jsonl.gz").write_text('{"text": "a"}')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}')[:-9])
    (tmp_path / "latin.jsonl").write_bytes('{"text": "café"}'.encode("latin-1"))
    for name in ("plain.jsonl.gz", "cut.jsonl.gz", "latin.jsonl", ""):
        assert f"{tmp_path / name} cannot be read as UTF-8 text" in error_of(str(tmp_path / name))


@pytest.mark.parametrize("name", ["e.jsonl", "e.json"])
@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_named(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert error_of(str(path)) == f"prompt file {path} is empty; it needs at least one row."


BAD_ROWS = {
    "cut off": ('{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
    "not an object": ("[1]", "a row must be a JSON object, got list"),
    "unknown layout": (
        {"question": "a", "answer": "b"},
        "unknown layout with the keys question, answer; a row needs turns (with id and task, or with "
        "question_id and category), messages, conversations, prompt or text",
    ),
    "no keys": ({}, "unknown layout with the keys (none)"),
    "blank prompt": ({"prompt": " \n"}, "prompt is blank; write its text or remove the row"),
    "null text": ({"text": None}, "text must be a string, got NoneType"),
    "no turns": ({"turns": []}, "turns must be a list of at least one string"),
    "turns not a list": ({"turns": "a"}, "turns must be a list of at least one string"),
    "blank turn": ({"turns": ["a", ""]}, "turns[1] is blank"),
    "turn not text": ({"turns": ["a", 3]}, "turns[1] must be a string, got int"),
    "history not a list": ({"turns": ["a"], "history": "b"}, "history must be a list of objects"),
    "id not text": ({"turns": ["a"], "id": ["b"]}, "id must be a string, got list"),
    "blank task": ({"turns": ["a"], "task": ""}, "task is blank"),
    "message not an object": (
        {"messages": ["a"]},
        "messages must be a list of objects with the keys role and content",
    ),
    "no messages": ({"messages": []}, "there is no user message to answer"),
    "no user": ({"messages": CHAT[:1]}, "there is no user message to answer"),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        "messages[0].content must be a string, got list",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content must be a string, got NoneType"),
    "unknown role": (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages[0].role must be one of system, user, assistant, got 'tool'",
    ),
    "two answers": ({"messages": CHAT + [CHAT[2], CHAT[2]]}, "only one assistant message may follow"),
    "blank value": ({"conversations": [{"from": "human", "value": ""}]}, "conversations[0].value is blank"),
    "unknown speaker": (
        {"conversations": [{"from": "user", "value": "a"}]},
        "conversations[0].from must be one of system, human, gpt, got 'user'",
    ),
}


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_row_is_an_error_that_names_file_line_and_problem(tmp_path, row, problem):
    path = write_jsonl(tmp_path / "bad.jsonl", {"text": "good"}, "", row, {"text": "good"})
    assert error_of(path, limit=1).startswith(f"{path}:3: {problem}")


def test_bad_row_of_an_array_is_named_by_its_number(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([{"text": "good"}, {"text": ""}]))
    assert error_of(str(path)).startswith(f"{path}: row 2: text is blank")


def test_json_file_that_is_no_array_says_what_to_do(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    message = error_of(str(path))
    assert message.startswith(f"{path}:2: not JSON: Extra data") and "ends in .jsonl" in message
    path.write_text('{"text": "a"}')
    assert error_of(str(path)) == f"{path}:1: a .json file must hold an array of rows, got dict"
