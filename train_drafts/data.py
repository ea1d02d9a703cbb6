"""Files of answers -> examples: token ids with a mask of what the assistant wrote.

A conversation is masked by comparing renderings of the chat template, never by looking for its words:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |---- rendering up to the answer, with prompt ----|                     |  also the prompt's ids at inference
    |---- rendering up to and with the answer ------------------------------|
                                                      |-- supervised --|
"""

import collections
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.loading.rows import read as read_rows
from specjax.loading.tokenizer import Tokenizer

Masked = tuple[np.ndarray, np.ndarray]  # ids int32 [T] and mask bool [T]

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True)
class Example:
    """One sequence to train on: `ids` int32 [T]; `mask` bool [T], True where the assistant wrote the token.

    The end token of an answer is supervised too. `source`: file name and row number.
    """

    ids: np.ndarray
    mask: np.ndarray
    source: str


@dataclass(frozen=True)
class Report:
    """What became of a file's rows.

    `dropped`: reason -> rows, or turns of a row that became one example a turn. `cut`: examples that lost their end
    to the longest length. `finishes`: how distilled answers ended ("stop" or "length") -> examples. `user_written`:
    some answers came as messages, so the target did not write them as far as anyone knows.
    """

    rows: int
    examples: int
    dropped: Mapping[str, int]
    cut: int
    tokens: int
    supervised: int
    finishes: Mapping[str, int]
    user_written: bool

    @property
    def mask_ratio(self) -> float:
        """Share of tokens that are supervised."""
        return self.supervised / self.tokens

    def lines(self) -> list[str]:
        """Two to four sentences for people."""
        dropped = f"; dropped: {_counts(self.dropped)}" if self.dropped else "; none dropped"
        finishes = f"; answers ended by {_counts(self.finishes)}" if self.finishes else ""
        lines = [
            f"{self.examples:,} examples from {self.rows:,} rows{dropped}.",
            f"{self.supervised:,} of {self.tokens:,} tokens are supervised ({self.mask_ratio:.1%}){finishes}.",
        ]
        if self.cut:
            lines.append(f"{self.cut:,} examples were cut at the end to the longest length.")
        if self.user_written:
            lines.append(
                "these answers were not written by the target; regenerate them with python -m launch.distill for a "
                "better draft"
            )
        return lines


class _Dropped(Exception):
    """A row that teaches nothing; its text is the reason to count."""


def load(
    path: str | Path, tokenizer: Tokenizer, *, max_tokens: int, template_args: Mapping[str, Any] | None = None
) -> tuple[list[Example], Report]:
    """Read and mask the examples of a file, in its order.

    Args:
        path: a .jsonl file, a .json file with an array (either gzipped if its name ends in .gz), or a folder that
            distillation wrote (DIR/shards/*.jsonl). The keys of a row decide how it is read, the first match wins:
            `prompt_ids` and `response_ids` (distilled, used as they are), `messages` (OpenAI), `conversations`
            (ShareGPT). User turns after the last answer are left out.
        max_tokens: a longer text is cut at the end.
        template_args: further variables of the chat template; those of decoding.

    Raises:
        FileNotFoundError: if there is no such file, or no shard in the folder.
        ValueError: naming the row, if it is no JSON or has no known layout, or if the template refuses it or writes
            answers that cannot be told from their prompts; if nothing, or everything, is supervised.
    """
    path = Path(path).expanduser()
    examples, rows, cut, user_written = [], 0, 0, False
    dropped, finishes = collections.Counter(), collections.Counter()
    for where, row in _rows(path):
        rows += 1
        for ids, mask in _masked(where, row, tokenizer, template_args, dropped):
            if not mask[:max_tokens].any():
                dropped[f"prompt alone fills {max_tokens} tokens" if mask.any() else "nothing supervised"] += 1
                continue
            examples.append(Example(ids[:max_tokens], mask[:max_tokens], Path(where).name))
            cut += len(ids) > max_tokens
            if _is_distilled(row):
                finishes[str(row.get("finish"))] += 1
            else:
                user_written = True
    tokens = sum(len(example.ids) for example in examples)
    supervised = sum(int(example.mask.sum()) for example in examples)
    report = Report(rows, len(examples), dropped, cut, tokens, supervised, finishes, user_written)
    _check_ratio(path, report)
    return examples, report


def fingerprint(examples: Sequence[Example]) -> str:
    """Sixteen hex digits over all ids and masks in their order."""
    state = hashlib.sha256()
    for example in examples:
        state.update(len(example.ids).to_bytes(8, "little"))
        state.update(example.ids.astype("<i4").tobytes() + example.mask.tobytes())
    return state.hexdigest()[:16]


def draft_vocabulary(examples: Sequence[Example], size: int, end_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The most frequent supervised ids, int32 [size] ascending: the vocabulary of a draft's head.

    Ties go to the lowest id, end tokens are always in, and the lowest unused ids fill what is left.
    As EAGLE-3's trainers choose it.

    Raises ValueError if `size` is not between the number of end tokens and `vocab_size`, or an id is too large.
    """
    if not max(1, len(set(end_ids))) <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} tokens does not fit: it needs at least the {len(set(end_ids))} end tokens "
            f"and at most the target's {vocab_size}; choose a size between"
        )
    counts = np.bincount(_supervised(examples), minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ValueError(f"the data has token id {len(counts) - 1} but the target only {vocab_size}; use its tokenizer")
    counts[list(end_ids)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(examples: Sequence[Example], token_ids: np.ndarray) -> float:
    """Share of the supervised tokens that are among `token_ids` [V]."""
    return float(np.isin(_supervised(examples), token_ids).mean())


def _supervised(examples: Sequence[Example]) -> np.ndarray:
    return np.concatenate([example.ids[example.mask] for example in examples])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _masked(
    where: str, row: Mapping, tokenizer: Tokenizer, template_args: Mapping | None, dropped: collections.Counter
) -> list[Masked]:
    """All sequences of a row, not yet cut; none, and a reason counted, if it teaches nothing."""
    try:
        if _is_distilled(row):
            return [_distilled(row, tokenizer.vocab_size)]
        return _rendered(_messages(row), tokenizer, template_args)
    except _Dropped as reason:
        dropped[str(reason)] += 1
        return []
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_ratio(path: Path, report: Report) -> None:
    if not report.examples:
        raise ValueError(
            f"{path} holds nothing to train on: {report.rows} rows, dropped: {_counts(report.dropped) or 'none'}; "
            "give rows with answers"
        )
    if report.supervised == report.tokens:
        raise ValueError(f"all {report.tokens} tokens of {path} are supervised; give rows that have prompts too")


# Masking


def _rendered(messages: list[dict[str, str]], tokenizer: Tokenizer, template_args: Mapping | None) -> list[Masked]:
    """Masked by the template: one sequence, or one for each answer where the template rewrites earlier answers.

    Raises ValueError if an answer's rendering does not go on from its generation prompt.
    """
    turns = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.render(messages[:i], template_args)
            turns.append((prompt, tokenizer.render(messages[: i + 1], template_args, add_generation_prompt=False)))
    for prompt, turn in turns:
        if not turn.startswith(prompt):
            raise ValueError(
                f"the chat template of {tokenizer.source} does not write an answer after the prompt {prompt[-40:]!r} "
                "that it asks with, so answers cannot be masked; let the target answer (python -m launch.distill) "
                "or give other template arguments"
            )
    whole = turns[-1][1]
    if all(whole.startswith(turn) for _, turn in turns):
        return [_supervise(turns, tokenizer)]
    return [_supervise([turn], tokenizer) for turn in turns]


def _supervise(turns: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Masked:
    """The last turn's ids and the mask of all answers. `turns`: text up to each answer and text including it.

    Raises _Dropped if a prompt's own ids are not where the ids of the whole text begin: no such prompt is ever
    decoded.
    """
    encode = tokenizer.encode_rendered
    ids = np.array(encode(turns[-1][1]), np.int32)
    mask = np.zeros(len(ids), np.bool_)
    for prompt, turn in turns:
        before = np.array(encode(prompt), np.int32)
        start = len(before)
        if _common(ids, before) < start:
            raise _Dropped("a token spans a prompt and its answer")
        # White space after the end token is the template's; where there is no end token it cannot be told apart.
        stop = _common(ids, np.array(encode(turn.rstrip()), np.int32))
        ends = np.flatnonzero(np.isin(ids[start:stop], tokenizer.end_ids))
        mask[start : start + ends[0] + 1 if len(ends) else stop] = True
    return ids, mask


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids the two begin with in common."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


# Rows


def _is_distilled(row: Mapping[str, Any]) -> bool:
    return "prompt_ids" in row and "response_ids" in row


def _distilled(row: Mapping[str, Any], vocab_size: int) -> Masked:
    """Stored ids, as they are; the response is supervised. Raises ValueError unless both are lists of integers."""
    for name in ("prompt_ids", "response_ids"):
        if not isinstance(row[name], list) or not all(type(i) is int for i in row[name]):
            raise ValueError(f"{name} must be a list of integers; let python -m launch.distill write the row again")
    ids = row["prompt_ids"] + row["response_ids"]
    if not row["response_ids"]:
        raise _Dropped("empty assistant text")
    if not all(0 <= i < vocab_size for i in ids):
        raise _Dropped("ids outside the vocabulary")
    return np.array(ids, np.int32), np.arange(len(ids)) >= len(row["prompt_ids"])


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """OpenAI or ShareGPT row -> {"role", "content"} messages up to the last answer.

    Raises ValueError if the row has no known layout, _Dropped if its conversation teaches nothing.
    """
    name = next((key for key in ("messages", "conversations") if key in row), None)
    if name is None:
        raise ValueError(
            f"unknown layout with the keys {', '.join(row) or '(none)'}; a row needs prompt_ids and response_ids, "
            "messages, or conversations"
        )
    items = row[name] or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name} must be a list of objects with role and content, or from and value")
    pairs = [(item.get("role", item.get("from")), item.get("content", item.get("value"))) for item in items]
    if not pairs:
        raise _Dropped("no messages")
    if not all(isinstance(role, str) and role in _ROLES for role, _ in pairs):
        raise _Dropped("a role other than system, user and assistant")
    if not all(_is_text(content) for _, content in pairs):
        raise _Dropped("non-text content")
    messages = [{"role": _ROLES[role], "content": content} for role, content in pairs]
    _check_turns(messages)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


def _check_turns(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises _Dropped unless user and assistant alternate after an optional system message and no answer is empty."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    roles = [message["role"] for message in turns]
    if "system" in roles:
        raise _Dropped("a system message after the first")
    if roles[:1] == ["assistant"]:
        raise _Dropped("starts with the assistant")
    for role in ("user", "assistant"):
        if (role, role) in zip(roles, roles[1:]):
            raise _Dropped(f"two {role} turns in a row")
    if "assistant" not in roles:
        raise _Dropped("no assistant text")
    if not all(message["content"].strip() for message in turns if message["role"] == "assistant"):
        raise _Dropped("empty assistant text")


def _is_text(value: Any) -> bool:
    """Whether it is a string that has a UTF-8 form; JSON can also spell halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# Files


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of every row. Raises FileNotFoundError or ValueError as `load` does."""
    if not path.exists():
        raise FileNotFoundError(f"training data {path} does not exist; check the path")
    files = sorted((path / "shards").glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no shards/*.jsonl; give a file, or a folder that launch.distill wrote")
    for file in files:
        yield from read_rows(file)
