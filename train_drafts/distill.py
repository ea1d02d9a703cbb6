"""Distillation: prompts -> the target's own answers, in fixed batches that are the unit of resume.

prompts --encode, drop--> requests --windows--> batches of one cache size and temperature --decode--> shards

DIR/distill.json     what was asked for; another wish is refused
DIR/shards/00042.jsonl   one batch, written whole once its last row has ended
DIR/summary.json     counts, drops and speed
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.workloads import Prompt
from specjax.decode import continuous
from specjax.decode.engine import Engine
from specjax.decode.request import MAX_SEED, Sampling
from specjax.telemetry import say, write_json, write_text

WINDOW = 1024  # prompts that are sorted into batches together; any prefix of windows is as mixed as the file
SLOTS_A_ROW = 1024  # longer caches take fewer rows, so that a batch of them holds no more slots than this many a row
ROWS_STEP = 8  # few requests take a multiple of this many rows, so that few programs are compiled

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """How to answer: prompt i at `temperatures[i % n]`, with at most `max_new_tokens` tokens and seed `seed + i`.

    Prompts above `max_prompt` tokens are dropped; `batch_size` rows decode together.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 256
    max_prompt: int = 3000
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self):
        for name in ("max_new_tokens", "max_prompt", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.temperatures:
            raise ValueError("no temperature was given; 0,0.8 answers half of the prompts greedily")
        for temperature in self.temperatures:
            Sampling(temperature=temperature, seed=self.seed)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to answer: its row in the file, its task, its token ids and its temperature."""

    row: int
    task: str
    ids: list[int]
    temperature: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that share a cache size and a temperature, and the shard that they become."""

    number: int
    slots: int
    requests: tuple[Request, ...]

    @property
    def kind(self) -> tuple[int, float]:
        """Cache size and temperature."""
        return self.slots, self.requests[0].temperature


@dataclasses.dataclass
class Progress:
    """What there is to do, what all runs of a folder have done, and what this one has.

    `total`: rows there will be in all, `rows`: those finished; `new_tokens` and `seconds` are this run's own.
    """

    prompts: int
    dropped: Mapping[str, int]
    total: int
    prompt_tokens: int
    rows: int = 0
    answer_tokens: int = 0
    finishes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """This run's new tokens over its seconds, compiling counted in; None before its first batch."""
        return self.new_tokens / self.seconds if self.seconds else None

    def take(self, row: Mapping[str, Any]) -> None:
        """Count one finished row."""
        self.rows += 1
        self.answer_tokens += len(row["response_ids"])
        self.finishes[row["finish"]] += 1

    def summary(self) -> dict[str, Any]:
        """Counts of the folder, and the speed of this run."""
        names = ("prompts", "rows", "dropped", "prompt_tokens", "answer_tokens", "finishes", "tokens_per_second")
        return {name: getattr(self, name) for name in names}


def run(engine: Engine, prompts: Sequence[Prompt], wish: Wish, out: Path) -> Iterator[Progress]:
    """Answer all prompts into `out`, going on from what an earlier run of the same wish has finished.

    Yields the progress, always the same object, before the first batch and after each. Raises ValueError if no prompt
    can be answered, or if `out` holds the answers of another target, other prompts or another wish.
    """
    requests, dropped = read_requests(engine, prompts, wish)
    batches = plan(engine, requests, wish)
    settings = describe(engine, wish, batches)
    check_same(out / "distill.json", settings)
    write_json(out / "distill.json", settings)
    progress = Progress(len(prompts), dropped, len(requests), sum(len(request.ids) for request in requests))
    finished = {batch.number for batch in batches if shard(out, batch).exists()}
    for batch in batches:
        if batch.number in finished:
            for row in read_shard(shard(out, batch)):
                progress.take(row)
    if finished:
        say(f"going on: {len(finished)} of {len(batches)} batches are there already")
    yield progress
    start = time.perf_counter()
    for stream in streams(batches):
        missing = [batch for batch in stream if batch.number not in finished]
        for batch, rows in answer(engine, missing, wish, rows_together(stream, wish)):
            write_text(shard(out, batch), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            for row in rows:
                progress.take(row)
            progress.new_tokens += sum(len(row["response_ids"]) for row in rows)
            progress.seconds = time.perf_counter() - start
            yield progress
    write_json(out / "summary.json", progress.summary())


def read_requests(engine: Engine, prompts: Sequence[Prompt], wish: Wish) -> tuple[list[Request], dict[str, int]]:
    """Prompts -> requests, and how many prompts or turns were left out by reason.

    Raises ValueError if no request is left.
    """
    context, words = engine.max_context, engine.target.tokenizer
    if wish.max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens is {wish.max_new_tokens} and the context {context}, which leaves no room for a prompt; "
            "lower --max_new_tokens or raise --max_context"
        )
    room = min(wish.max_prompt, context - wish.max_new_tokens)
    kept, dropped = [], collections.Counter()
    for row, prompt in enumerate(prompts):
        if prompt.history and not words.has_chat_template:
            dropped["conversations (the target has no chat template)"] += 1
            continue
        try:
            ids = encode(engine, prompt)
        except ValueError:
            dropped["refused by the chat template"] += 1
            continue
        if not 0 < len(ids) <= room:
            dropped[f"longer than {room} tokens" if ids else "without any token"] += 1
            continue
        if len(prompt.turns) > 1:
            dropped["later turns of a conversation (its first turn is answered)"] += len(prompt.turns) - 1
        kept.append(Request(row, prompt.task, ids, wish.temperatures[row % len(wish.temperatures)]))
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise ValueError(f"none of the {len(prompts)} prompts can be answered ({reasons}); give other prompts")
    return kept, dict(dropped)


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """The ids of a prompt's first turn and what precedes it; as plain text where the target has no chat template.

    Raises ValueError if the template refuses it.
    """
    words = engine.target.tokenizer
    if not words.has_chat_template:
        return words.encode(prompt.turns[0])
    return words.encode_chat([*prompt.history, {"role": "user", "content": prompt.turns[0]}], engine.template_args)


def plan(engine: Engine, requests: Sequence[Request], wish: Wish) -> list[Batch]:
    """Fixed batches: windows of the file in order, each sorted by cache size, temperature and prompt chunks."""
    batches = []
    for first in range(0, len(requests), WINDOW):
        groups = collections.defaultdict(list)
        for request in requests[first : first + WINDOW]:
            slots = continuous.slots_needed(engine, len(request.ids), wish.max_new_tokens)
            groups[slots, request.temperature].append(request)
        for (slots, _), group in sorted(groups.items()):
            group.sort(key=lambda request: (-(-len(request.ids) // engine.chunk), request.row))
            for start in range(0, len(group), wish.batch_size):
                batches.append(Batch(len(batches), slots, tuple(group[start : start + wish.batch_size])))
    return batches


def streams(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Consecutive batches of one cache size and temperature: rows of one flow into the places of the one before."""
    for _, stream in itertools.groupby(batches, key=lambda batch: batch.kind):
        yield list(stream)


def rows_together(stream: Sequence[Batch], wish: Wish) -> int:
    """Rows that decode together: fewer where caches are long or requests are few.

    Decided by the whole stream, finished batches too, so that a resumed run goes through the same programs.
    """
    requests = sum(len(batch.requests) for batch in stream)
    fitting = wish.batch_size * SLOTS_A_ROW // stream[0].slots
    return max(1, min(wish.batch_size, fitting, -(-requests // ROWS_STEP) * ROWS_STEP))


def answer(engine: Engine, batches: Sequence[Batch], wish: Wish, rows: int) -> Iterator[tuple[Batch, list[Row]]]:
    """Decode batches of one kind, `rows` at a time; yield each with its answers when the last of them has ended.

    A place that falls free goes to the next batch's first prompt, so the device never waits for the longest row.
    """
    requests = [(batch, request) for batch in batches for request in batch.requests]
    ids = [request.ids for _, request in requests]
    samplings = [
        Sampling(
            max_new_tokens=wish.max_new_tokens,
            temperature=request.temperature,
            seed=(wish.seed + request.row) % MAX_SEED,
        )
        for _, request in requests
    ]
    done = collections.defaultdict(dict)
    for index, result in continuous.generate(engine, ids, samplings, batch_size=rows):
        batch, request = requests[index]
        done[batch.number][request.row] = {
            "row": request.row,
            "task": request.task,
            "temperature": request.temperature,
            "prompt_ids": request.ids,
            "response_ids": result.tokens,
            "response": result.text,
            "finish": result.finish_reason,
        }
        if len(done[batch.number]) == len(batch.requests):
            yield batch, [row for _, row in sorted(done.pop(batch.number).items())]


def shard(out: Path, batch: Batch) -> Path:
    return out / "shards" / f"{batch.number:05d}.jsonl"


def read_shard(path: Path) -> Iterator[Row]:
    """The rows of a finished shard."""
    with path.open(encoding="utf-8") as lines:  # splitlines() would break strings at U+2028
        yield from map(json.loads, lines)


def describe(engine: Engine, wish: Wish, batches: Sequence[Batch]) -> dict[str, Any]:
    """What the answers depend on, as JSON holds it; `batches` stands for all prompts, as they were encoded."""
    target, state = engine.target, hashlib.sha256()
    for batch in batches:
        for request in batch.requests:
            state.update(f"{batch.number} {batch.slots} {request.row} {request.temperature} {request.ids}".encode())
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "tokenizer": target.tokenizer.fingerprint,
        "dtype": target.dtype.__name__,
        "template_args": engine.template_args,
        "wish": dataclasses.asdict(wish) | {"temperatures": list(wish.temperatures)},
        "batches": state.hexdigest()[:16],
    }


def check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting that differs if `path` records another run."""
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    before, now = before | before["wish"], settings | settings["wish"]
    different = [key for key in now if key != "wish" and before.get(key) != now[key]]
    if different:
        # The digest of the batches goes last: it differs too where something that has a name of its own does.
        key = min(different, key=lambda key: key == "batches")
        name = "the digest of the prompts" if key == "batches" else key
        raise ValueError(
            f"{path.parent} holds the answers of another run: {name} was {before.get(key)!r} and is now {now[key]!r}; "
            "give the same settings again or another --out"
        )
