"""Let the target answer prompts: the text that its draft is trained on.

    python -m launch.distill --target=HF_DIR --prompts=prompts.jsonl --out=data
    python -m launch.distill --prompts=prompts.jsonl.gz --out=data --limit=2000 --max_new_tokens=160

Prompts: JSONL in any layout that launch.bench reads (plain, OpenAI messages, ShareGPT, Spec-Bench). The same command
again goes on where it was stopped. Half of the answers are greedy, half sampled at 0.8, unless --temperatures says
otherwise.
"""

import json
import shlex
import sys
from pathlib import Path

from absl import flags
from tqdm import tqdm

from launch import common
from specjax.bench import workloads
from specjax.decode.setup import Setup
from specjax.telemetry import say, summary_writer
from train_drafts import distill

flags.adopt_module_key_flags(common)
_WISH = distill.Wish()
PROMPTS = flags.DEFINE_string("prompts", None, "File of prompts.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder for the answers.", required=True)
LIMIT = flags.DEFINE_integer("limit", None, "Answer the first N prompts only.", lower_bound=1)
TEMPERATURES = flags.DEFINE_list(
    "temperatures", [f"{t:g}" for t in _WISH.temperatures], "Prompt i is answered at temperature i modulo their number."
)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", _WISH.max_new_tokens, "Most tokens of an answer.")
MAX_PROMPT = flags.DEFINE_integer("max_prompt", _WISH.max_prompt, "Longer prompts are left out.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", _WISH.batch_size, "Rows decoded together.")
SEED = flags.DEFINE_integer("seed", _WISH.seed, "Fixes the sampled answers.")
LOG_SECONDS = 10  # between two lines of progress where no terminal shows a bar


def run() -> None:
    wish = distill.Wish(
        temperatures=tuple(common.numbers(TEMPERATURES, float)),
        max_new_tokens=MAX_NEW_TOKENS.value,
        max_prompt=MAX_PROMPT.value,
        batch_size=BATCH_SIZE.value,
        seed=SEED.value,
    )
    out = Path(OUT.value)
    common.check_writable(out / "summary.json")
    prompts = workloads.load(str(Path(PROMPTS.value).resolve()))[: LIMIT.value]
    setup = common.setup(common.CONFIG.value)
    engine = setup.open()
    say(common.device_line(engine))
    steps = distill.run(engine, prompts, wish, out)
    progress = next(steps)
    for reason, count in progress.dropped.items():
        say(f"left out: {count} {reason}")
    with summary_writer(out / "tensorboard") as writer, bar(progress) as shown:
        for progress in steps:
            shown.set_postfix_str(f"{progress.tokens_per_second:.0f} tokens/s", refresh=False)
            shown.update(progress.rows - shown.n)
            writer.add_scalar("distill/tokens_per_second", progress.tokens_per_second, progress.rows)
            writer.add_scalar("distill/tokens", progress.answer_tokens, progress.rows)
    report(progress)
    print(f"written: {out}")
    print("see:", shlex.join(["tensorboard", "--logdir", str(out)]))
    print("next:", shlex.join(next_command(setup, out)))


class Lines:
    """Standard error for a log file: each state of a progress bar becomes a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            say(line)

    def flush(self) -> None:
        pass


def bar(progress: distill.Progress) -> tqdm:
    """A bar over rows that begins at those of earlier runs: a moving one on a terminal, else a line now and then."""
    moving = sys.stderr.isatty()
    return tqdm(
        total=progress.total,
        initial=progress.rows,
        unit="row",
        smoothing=0.05,
        file=sys.stderr if moving else Lines(),
        mininterval=1 if moving else LOG_SECONDS,
        miniters=1,
    )


def report(progress: distill.Progress) -> None:
    finishes = ", ".join(f"{count} by {reason}" for reason, count in sorted(progress.finishes.items()))
    print(f"{progress.rows} of {progress.prompts} prompts answered, {progress.answer_tokens} tokens ({finishes})")
    for reason, count in progress.dropped.items():
        print(f"  left out: {count} {reason}")


def next_command(setup: Setup, out: Path) -> list[str]:
    """Training on these answers, with what was said here about the target."""
    asked = {name: getattr(setup, name) for name in ("target", "tokenizer", "dtype", "template_args")}
    given = {name: value for name, value in asked.items() if value != getattr(Setup(), name)}
    if "template_args" in given:
        given["template_args"] = json.dumps(given["template_args"])
    command = ["python", "-m", "launch.train", "--config=configs/medusa.py"]
    return [*command, *(f"--{name}={value}" for name, value in given.items()), f"--data={out}", "--workdir=runs/medusa"]


if __name__ == "__main__":
    common.main(run)
