"""Rows of JSON objects from files that people made: one object a line, or one array."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place ("FILE:3", or "FILE: row 3" in an array) and the object of every row that is not blank.

    A name that ends in .json holds an array, any other one object a line; either is gzipped if .gz follows.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the place, if it is no UTF-8 text or no JSON, or if a row is no object.
    """
    rows = _array if path.name.removesuffix(".gz").endswith(".json") else _lines
    for where, row in rows(_text(path), path):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
        yield where, row


def _text(path: Path) -> str:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:  # -sig: some editors write a byte-order mark
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; check the path") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({error}); correct it or download it again") from error


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would break strings at U+2028
        if line.strip():
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            yield where, row


def _array(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; a file with one object a "
            "line needs a name that ends in .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}:1: a .json file must hold an array of rows, got {type(rows).__name__}")
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
