"""Distillation: the answers are the target's own, every prompt is accounted for, and a stopped run goes on."""

import collections
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripted import CHAT, save_target

from specjax.bench import workloads
from specjax.decode.engine import Engine
from specjax.decode.request import Sampling
from specjax.decode.setup import Setup
from train_drafts import data, distill

ROOT = Path(__file__).parent.parent
WISH = distill.Wish(max_new_tokens=24, max_prompt=700, batch_size=4, seed=2**32 - 5)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
SHORT, LONG = 26, 3
PROMPTS = SHORT + LONG + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target with caches of 512 and 1,152 slots; one of its words holds a line separator."""
    folder = save_target(
        tmp_path_factory.mktemp("tiny target"), {"max_position_embeddings": 1024, "eos_token_id": [5, 17, 33]}
    )
    words = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(words.replace('"t41"', '"t41\u2028t"'), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": NO_SYSTEM + CHAT}))
    return folder


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Setup(target=str(folder), chunk=64).open()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Prompts in several layouts: long ones, one too long, one refused, one of three turns, one beyond the limit."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"t{i}" for i in rng.integers(2, 97, count))

    def message(role: str, count: int) -> dict[str, str]:
        return {"role": role, "content": words(count)}

    rows = [{"prompt": words(count)} for count in rng.integers(3, 90, SHORT - 2)]
    rows += [{"prompt": words(600)} for _ in range(LONG)]
    rows.insert(3, {"prompt": words(900)})
    rows.insert(8, {"messages": [message("system", 4), message("user", 9)]})
    rows.insert(9, {"messages": [message("user", 7), message("assistant", 5), message("user", 6)]})
    rows.insert(14, {"turns": [words(5), words(6), words(7)], "id": "talk", "task": "chat"})
    rows.append({"prompt": words(5)})
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompts(file) -> list[workloads.Prompt]:
    return workloads.load(str(file))[:PROMPTS]


@pytest.fixture(scope="module")
def whole(engine, prompts, tmp_path_factory) -> Path:
    """What a run that nothing stops writes."""
    out = tmp_path_factory.mktemp("whole")
    collections.deque(distill.run(engine, prompts, WISH, out), maxlen=0)
    return out


def shards(out: Path) -> dict[str, bytes]:
    """Every file of the shards folder."""
    return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}


def rows(out: Path) -> dict[int, dict]:
    """All answers by the row of their prompt; none is there twice."""
    found = [json.loads(line) for text in shards(out).values() for line in text.decode().split("\n")[:-1]]
    assert len({row["row"] for row in found}) == len(found)
    return {row["row"]: row for row in found}


def test_answers_are_what_generate_writes(engine, prompts, whole):
    """Alone, with the seed of the row (which wraps around), at temperatures that take turns."""
    found = rows(whole)
    asked = [
        Sampling(max_new_tokens=24, temperature=(0.0, 0.8)[row % 2], seed=(WISH.seed + row) % 2**32) for row in found
    ]
    ids = [engine.encode([*prompts[row].history, {"role": "user", "content": prompts[row].turns[0]}]) for row in found]
    for (row, answer), prompt, wish, result in zip(found.items(), ids, asked, engine.generate(ids, asked), strict=True):
        assert answer == {
            "row": row,
            "task": prompts[row].task,
            "temperature": wish.temperature,
            "prompt_ids": prompt,
            "response_ids": result.tokens,
            "response": result.text,
            "finish": result.finish_reason,
        }
    assert {answer["finish"] for answer in found.values()} == {"stop", "length"}
    assert any("\u2028" in answer["response"] for answer in found.values())


def test_every_prompt_is_counted(engine, whole):
    found, summary = rows(whole), json.loads((whole / "summary.json").read_text())
    assert len(found) == SHORT + LONG and not {3, 8} & set(found)
    assert summary.pop("tokens_per_second") > 0
    assert summary == {
        "prompts": PROMPTS,
        "rows": SHORT + LONG,
        "dropped": {
            "longer than 700 tokens": 1,
            "refused by the chat template": 1,
            "later turns of a conversation (its first turn is answered)": 2,
        },
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in found.values()),
        "answer_tokens": sum(len(row["response_ids"]) for row in found.values()),
        "finishes": dict(collections.Counter(row["finish"] for row in found.values())),
    }
    examples, report = data.load(whole, engine.target.tokenizer, max_tokens=1024)
    assert (len(examples), report.supervised) == (SHORT + LONG, summary["answer_tokens"])


def test_batches_share_cache_size_and_temperature_and_long_ones_take_fewer_rows(engine, prompts):
    requests, _ = distill.read_requests(engine, prompts, WISH)
    batches = distill.plan(engine, requests, WISH)
    assert sorted(request.row for batch in batches for request in batch.requests) == [r.row for r in requests]
    for batch in batches:
        assert len(batch.requests) <= 4 and len({request.temperature for request in batch.requests}) == 1
        assert {len(request.ids) + 24 < 512 for request in batch.requests} == {batch.slots == 512}
    streams = list(distill.streams(batches))
    assert [stream[0].kind for stream in streams] == [(512, 0.0), (512, 0.8), (1152, 0.0), (1152, 0.8)]
    assert [distill.rows_together(stream, WISH) for stream in streams] == [4, 4, 3, 3]
    wide = dataclasses.replace(WISH, batch_size=64)
    assert distill.rows_together(distill.plan(engine, requests, wide)[:1], wide) == 16


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_run_that_stopped_between_two_batches_goes_on(engine, prompts, whole, tmp_path, stop_after):
    steps = distill.run(engine, prompts, WISH, tmp_path)
    for _ in range(stop_after + 1):
        next(steps)
    steps.close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").iterdir()}
    assert len(before) == stop_after and not (tmp_path / "summary.json").exists()
    first, *_, last = (dataclasses.replace(step) for step in distill.run(engine, prompts, WISH, tmp_path))
    assert 0 < first.rows < last.rows == last.total == SHORT + LONG
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shards(tmp_path) == shards(whole)
    again = list(distill.run(engine, prompts, WISH, tmp_path))
    assert [step.rows for step in again] == [SHORT + LONG] and again[0].tokens_per_second is None


def test_a_shard_that_could_not_be_written_whole_is_not_there(engine, prompts, whole, tmp_path, monkeypatch):
    def full(*paths):
        raise OSError("disk full")

    steps = distill.run(engine, prompts, WISH, tmp_path)
    next(steps), next(steps)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "replace", full)
        next(steps)
    assert len(shards(tmp_path)) == 1
    collections.deque(distill.run(engine, prompts, WISH, tmp_path), maxlen=0)
    assert shards(tmp_path) == shards(whole)


def test_other_settings_in_the_same_folder_are_refused(engine, prompts, whole):
    other = Engine(engine.target, chunk=64, template_args={"thinking": False})
    for asked, wish, named in (
        (engine, dataclasses.replace(WISH, max_new_tokens=25), "max_new_tokens was 24 and is now 25"),
        (engine, dataclasses.replace(WISH, temperatures=(0.0,)), r"temperatures was \[0.0, 0.8\] and is now \[0.0\]"),
        (other, WISH, "template_args was {} and is now {'thinking': False}"),
    ):
        with pytest.raises(ValueError, match=f"^{whole} holds the answers of another run: {named}; give the same"):
            next(distill.run(asked, prompts, wish, whole))
    with pytest.raises(ValueError, match="the digest of the prompts was '[0-9a-f]{16}' and is now"):
        next(distill.run(engine, prompts[:-1], WISH, whole))


def test_without_a_chat_template_prompts_are_plain_text(prompts, tmp_path):
    plain = save_target(tmp_path, {"max_position_embeddings": 1024})
    (plain / "tokenizer_config.json").unlink()
    engine = Setup(target=str(plain), chunk=64).open()
    requests, dropped = distill.read_requests(engine, prompts, WISH)
    assert requests[0].ids == engine.target.tokenizer.encode(prompts[0].turns[0])
    assert dropped["conversations (the target has no chat template)"] == 2
    assert len(requests) == SHORT + LONG - 1


def test_impossible_wishes_are_refused_in_one_sentence(engine, prompts):
    for fields, named in (
        ({"batch_size": 0}, "batch_size is 0; it must be 1 or more"),
        ({"temperatures": ()}, "no temperature was given"),
        ({"temperatures": (0.0, -1.0)}, "temperature is -1.0; it must be"),
        ({"seed": -1}, "seed is -1; it must be"),
    ):
        with pytest.raises(ValueError, match=f"^{named}[^\n]*$"):
            distill.Wish(**fields)
    with pytest.raises(ValueError, match="max_new_tokens is 1024 and the context 1024, which leaves no room"):
        distill.read_requests(engine, prompts, distill.Wish(max_new_tokens=1024))
    with pytest.raises(ValueError, match=r"none of the 2 prompts can be answered \(2 longer than 2 tokens\)"):
        distill.read_requests(engine, prompts[:2], distill.Wish(max_prompt=2))


def test_a_killed_script_goes_on_and_says_what_comes_next(folder, file, whole, tmp_path):
    """kill -9 after the first shard; then the same command again."""
    out, about = tmp_path / "my data", [f"--target={folder}", '--template_args={"thinking": false}']
    wish = ["--max_new_tokens=24", "--max_prompt=700", "--batch_size=4", f"--seed={WISH.seed}", f"--limit={PROMPTS}"]
    command = [sys.executable, "-m", "launch.distill", *about, *wish, f"--prompts={file}", f"--out={out}"]
    begun = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not list(out.glob("shards/*.jsonl")) and begun.poll() is None:
        time.sleep(0.005)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    before = {path: path.stat().st_mtime_ns for path in out.glob("shards/*.jsonl")}
    assert 0 < len(before) < len(shards(whole))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path.name: path.read_bytes() for path in out.glob("shards/*.jsonl")} == shards(whole)
    assert f"going on: {len(before)} of {len(shards(whole))} batches are there already" in done.stderr
    assert "left out: 1 refused by the chat template" in done.stderr
    assert f"{SHORT + LONG}/{SHORT + LONG} [" in done.stderr and "\r" not in done.stderr  # no terminal, so lines
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert shlex.split(lines["see"]) == ["tensorboard", "--logdir", str(out)]
    assert list(out.glob("tensorboard/*tfevents*"))
    assert shlex.split(lines["next"]) == [
        *("python", "-m", "launch.train", "--config=configs/medusa.py"),
        *(*about, f"--data={out}", "--workdir=runs/medusa"),
    ]
