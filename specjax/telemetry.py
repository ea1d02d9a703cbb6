"""What a run tells: lines on the terminal while it works, files that are whole, scalars and text in TensorBoard."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tensorboardX import SummaryWriter
from tqdm import tqdm

LOG_SECONDS = 10  # between two lines of progress where there is no terminal


def say(line: str) -> None:
    """One line of progress on standard error, so that standard output stays the result."""
    print(line, file=sys.stderr, flush=True)


class _Lines:
    """Standard error for a log file: each state of a progress bar becomes a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            say(line)

    def flush(self) -> None:
        pass


def progress_bar(what: str, done: int, total: int, unit: str) -> tqdm:
    """A bar that begins at what earlier runs have done: a moving one on a terminal, else a line now and then."""
    moving = sys.stderr.isatty()
    return tqdm(
        desc=what,
        initial=done,
        total=total,
        unit=unit,
        smoothing=0.05,
        file=sys.stderr if moving else _Lines(),
        mininterval=1 if moving else LOG_SECONDS,
        miniters=1,
    )


def summary_writer(folder: Path, resumed_at: int | None = None) -> SummaryWriter:
    """A TensorBoard event writer for `folder`; use it as a context manager. What an earlier run wrote from step
    `resumed_at` on is hidden."""
    # tensorboardX names files by the second alone: a run resumed within one would overwrite what it goes on from.
    return SummaryWriter(str(folder), purge_step=resumed_at, filename_suffix=f".{time.time_ns()}")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` beside `path` and move it there, so that a half-written file never takes its place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's own files are for the user alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | Path, value) -> None:
    """`write_text` of `value` as JSON; NaN and infinities, which are no JSON, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
