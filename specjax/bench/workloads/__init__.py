"""Prompts for the benchmark: twelve packaged workloads, and readers for the usual layouts of prompt files."""

import collections
import dataclasses
import difflib
import importlib.resources
import pathlib
from collections.abc import Callable
from typing import Any

from specjax.loading.rows import read as read_rows

Turns = tuple[str, ...]
Messages = tuple[dict[str, str], ...]

WORKLOADS: tuple[str, ...] = (
    "chat",
    "multi_turn",
    "summarization",
    "translation",
    "qa",
    "rag",
    "math_reasoning",
    "code_completion",
    "code_editing",
    "extraction_json",
    "rewriting",
    "long_doc_qa",
)

_FILE_SUFFIXES = (".jsonl", ".json", ".gz")
_OPENAI_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """User turns to be answered one after another, and the {"role", "content"} messages that precede them."""

    id: str
    task: str
    turns: Turns
    history: Messages = ()


def load(names_or_file: str, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of packaged workloads or of a file, at most `limit` for each task.

    Args:
        names_or_file: "all", workload names separated by commas (one named twice counts once), or the path of
            a .jsonl file or of a .json file with an array, gzipped if its name ends in .gz. The keys of a row
            decide how it is read, the first match wins: `turns` (suite12, Spec-Bench), `messages` (OpenAI),
            `conversations` (ShareGPT), `prompt`, `text`. All rows are checked, also those beyond the limit.
        limit: prompts to keep for each task, in the order of the file; None keeps all.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for an unknown workload, a file that is unreadable or empty, or a row that does not parse,
            matches no layout, or has a prompt that is blank or not a string.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 prompt for each task, got {limit}.")
    names = WORKLOADS if names_or_file == "all" else [name.strip() for name in names_or_file.split(",")]
    unknown = [name for name in names if name not in WORKLOADS]
    if not unknown:
        prompts = [prompt for name in dict.fromkeys(names) for prompt in _load_packaged(name)]
    elif _is_path(names_or_file):
        prompts = _load_file(pathlib.Path(names_or_file))
    else:
        nearest = difflib.get_close_matches(unknown[0], WORKLOADS, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(
            f"unknown workload {unknown[0]!r}{hint}: choose from {', '.join(WORKLOADS)}, or all by itself, "
            f"or give the path of a {' or '.join(_FILE_SUFFIXES)} file."
        )
    return prompts if limit is None else _first_of_each_task(prompts, limit)


def _is_path(text: str) -> bool:
    """Whether text that names no workload means a file; the error for a typing mistake depends on it."""
    return text.endswith(_FILE_SUFFIXES) or "/" in text or pathlib.Path(text).is_file()


def _first_of_each_task(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """Keep the first `limit` prompts of each task, in their order."""
    counts: collections.Counter[str] = collections.Counter()
    kept = []
    for prompt in prompts:
        counts[prompt.task] += 1
        if counts[prompt.task] <= limit:
            kept.append(prompt)
    return kept


def _load_packaged(name: str) -> list[Prompt]:
    """Read one of the workloads that come with the package."""
    with importlib.resources.as_file(importlib.resources.files(__name__) / f"{name}.jsonl") as path:
        return _load_file(path)


def _load_file(path: pathlib.Path) -> list[Prompt]:
    """Read a whole prompt file; raises ValueError, which names the row, as `load` does."""
    inner = pathlib.Path(path.name.removesuffix(".gz"))
    prompts = []
    for where, row in read_rows(path):
        try:
            prompts.append(_parse_row(row, inner.stem, len(prompts)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not prompts:
        raise ValueError(f"prompt file {path} is empty; it needs at least one row.")
    return prompts


def _parse_row(row: dict[str, Any], stem: str, number: int) -> Prompt:
    """Turn a row into a Prompt by the first layout whose key it has; raises ValueError if there is none."""
    for key, read in _LAYOUTS.items():
        if key in row:
            turns, history = read(row)
            task = _label(row, ("task", "category"), stem)
            return Prompt(_label(row, ("id", "question_id"), f"{task}-{number:03d}"), task, turns, history)
    raise ValueError(
        f"unknown layout with the keys {', '.join(row) or '(none)'}; a row needs turns (with id and task, or "
        "with question_id and category), messages, conversations, prompt or text."
    )


def _label(row: dict[str, Any], keys: tuple[str, ...], default: str) -> str:
    """Return the value of the first key that the row has; raises ValueError if it is no text or integer."""
    for key in keys:
        if key in row:
            return str(row[key]) if type(row[key]) is int else _nonblank(row[key], key)
    return default


def _read_turns(row: dict[str, Any]) -> tuple[Turns, Messages]:
    """Read a suite12 or Spec-Bench row, which may also have a `history` of messages."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns must be a list of at least one string.")
    history = _read_messages(row["history"], "history") if "history" in row else ()
    return tuple(_nonblank(turn, f"turns[{i}]") for i, turn in enumerate(turns)), history


def _read_openai(row: dict[str, Any]) -> tuple[Turns, Messages]:
    """Read a list of {"role", "content"} messages."""
    return _split_at_last_user(_read_messages(row["messages"], "messages"))


def _read_sharegpt(row: dict[str, Any]) -> tuple[Turns, Messages]:
    """Read a list of {"from", "value"} messages."""
    return _split_at_last_user(
        _read_messages(row["conversations"], "conversations", ("from", "value"), _SHAREGPT_ROLES)
    )


def _read_messages(
    items: Any, name: str, keys: tuple[str, str] = ("role", "content"), roles: dict[str, str] = _OPENAI_ROLES
) -> Messages:
    """Return messages with the roles system, user and assistant; raises ValueError if one is malformed."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name} must be a list of objects with the keys {keys[0]} and {keys[1]}.")
    messages = []
    for i, item in enumerate(items):
        role = _string(item.get(keys[0]), f"{name}[{i}].{keys[0]}")
        if role not in roles:
            raise ValueError(f"{name}[{i}].{keys[0]} must be one of {', '.join(roles)}, got {role!r}.")
        # Only users must say something: a blank system prompt is common, and harmless.
        check = _nonblank if roles[role] == "user" else _string
        content = check(item.get(keys[1]), f"{name}[{i}].{keys[1]}")
        messages.append({"role": roles[role], "content": content})
    return tuple(messages)


def _split_at_last_user(messages: Messages) -> tuple[Turns, Messages]:
    """Return the last user message as the only turn and what precedes it; drop the answer that follows it."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError("there is no user message to answer.")
    if [message["role"] for message in messages[last + 1 :]] not in ([], ["assistant"]):
        raise ValueError("only one assistant message may follow the last user message.")
    return (messages[last]["content"],), messages[:last]


def _string(value: Any, name: str) -> str:
    """Return the value; raises ValueError if it is not a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {type(value).__name__}.")
    return value


def _nonblank(value: Any, name: str) -> str:
    """Return the value; raises ValueError if it is not a string or has nothing but white space."""
    if not _string(value, name).strip():
        raise ValueError(f"{name} is blank; write its text or remove the row.")
    return value


_LAYOUTS: dict[str, Callable[[dict[str, Any]], tuple[Turns, Messages]]] = {
    "turns": _read_turns,
    "messages": _read_openai,
    "conversations": _read_sharegpt,
    "prompt": lambda row: ((_nonblank(row["prompt"], "prompt"),), ()),
    "text": lambda row: ((_nonblank(row["text"], "text"),), ()),
}
