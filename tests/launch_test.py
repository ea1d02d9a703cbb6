"""The launch scripts as a user starts them: what they print, and one sentence for each kind of bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from checkpoints import TINY, save_folder, save_gguf

from specjax.costs import CostTable

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny random Llama whose words are w3 to w96."""
    folder = save_folder(tmp_path_factory.mktemp("target"))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, TINY["vocab_size"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    return folder


def launch(script: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"launch.{script}", "--config=configs/smollm2.py", "--max_context=64", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_generate_prints_the_text_and_json_the_same_for_both_methods(target):
    common = (f"--target={target}", "--prompt=w5 w6 w7 w5 w6", "--max_new_tokens=12", "--ignore_end")
    text = launch("generate", *common, "--temperature=0.7", "--seed=3")
    answer = launch("generate", *common, "--temperature=0.7", "--seed=3", "--method=lookup", "--json")
    assert (text.returncode, answer.returncode) == (0, 0), text.stderr + answer.stderr
    found = json.loads(answer.stdout)
    assert text.stdout == found["text"] + "\n"
    assert len(found["tokens"]) == 12 and found["finish_reason"] == "length"
    assert {"cycles", "tokens_per_cycle", "accepted_per_cycle", "acceptance_by_depth"} <= set(found["stats"])
    assert "device: " in text.stderr and "compiled eager loop" in text.stderr
    assert text.stderr.splitlines()[-1].startswith("eager: 5 prompt tokens, 12 new in ")


def test_costs_writes_a_table_and_says_where_drafts_pay(target, tmp_path):
    out = tmp_path / "costs.json"
    sizes = ("--batch_sizes=1", "--contexts=64", "--blocks=1,8", "--repeats=2")
    done = launch("costs", f"--target={target}", f"--out={out}", *sizes)
    assert done.returncode == 0, done.stderr
    table = CostTable.load(out)
    assert table.blocks == [1, 8] and table.drafts["lookup"][1, 64] > 0
    assert table.cycles["eager_over_pass"] > 0 and table.floor_ms > 0
    assert "floor: " in done.stdout and "64 slots: " in done.stdout and "next: " in done.stdout


def empty_prompt(target, folder):
    return f"--target={target}", "--prompt= "


def long_prompt(target, folder):
    return f"--target={target}", f"--prompt={'w5 ' * 70}"


def unknown_method(target, folder):
    return f"--target={target}", "--prompt=w5", "--method=lokup"


def truncated_gguf(target, folder):
    whole = save_gguf(folder / "whole.gguf", target).read_bytes()
    (folder / "half.gguf").write_bytes(whole[: len(whole) // 2])
    return f"--target={folder / 'half.gguf'}", f"--tokenizer={target}", "--prompt=w5"


def missing_shard(target, folder):
    save_folder(folder / "sharded", shard_size="20KB")
    next((folder / "sharded").glob("model-00002-*")).unlink()
    return f"--target={folder / 'sharded'}", f"--tokenizer={target}", "--prompt=w5"


def broken_row(target, folder):
    row = json.dumps({"messages": [{"role": "user", "content": "w5"}]})
    (folder / "chat.jsonl").write_text(f"{row}\n{row[:-9]}\n")
    return f"--target={target}", f"--messages={folder / 'chat.jsonl'}"


def blank_message(target, folder):
    (folder / "chat.json").write_text(json.dumps([{"role": "user", "content": " "}]))
    return f"--target={target}", f"--messages={folder / 'chat.json'}"


def broken_template_args(target, folder):
    return f"--target={target}", "--prompt=w5", "--template_args={oops}"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (empty_prompt, "the prompt is empty"),
        (long_prompt, "has 70 tokens and the context 64"),
        (unknown_method, "did you mean 'lookup'"),
        (truncated_gguf, "half.gguf"),
        (missing_shard, "model-00002-"),
        (broken_row, "chat.jsonl:2: not JSON"),
        (blank_message, "ends with an empty message"),
        (broken_template_args, "--template_args"),
    ],
)
def test_bad_input_ends_in_one_sentence(case, named, target, tmp_path):
    done = launch("generate", *case(target, tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("device: ")]
    assert sentence.startswith("error: ") and named in sentence
