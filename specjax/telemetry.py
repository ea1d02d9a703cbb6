"""What a run tells: lines on the terminal while it works, scalars and text in TensorBoard."""

import sys
from pathlib import Path

from tensorboardX import SummaryWriter


def say(line: str) -> None:
    """One line of progress on standard error, so that standard output stays the result."""
    print(line, file=sys.stderr, flush=True)


def summary_writer(folder: Path) -> SummaryWriter:
    """A TensorBoard event writer for `folder`; use it as a context manager."""
    return SummaryWriter(str(folder))
