"""Let the target answer prompts: the text that its draft is trained on.

    python -m launch.distill --target=HF_DIR --prompts=prompts.jsonl --out=data
    python -m launch.distill --prompts=prompts.jsonl.gz --out=data --limit=2000 --max_new_tokens=160

Prompts: JSONL in any layout that launch.bench reads (plain, OpenAI messages, ShareGPT, Spec-Bench). The same command
again goes on where it was stopped. Half of the answers are greedy, half sampled at 0.8, unless --temperatures says
otherwise.
"""

import shlex
from pathlib import Path

from absl import flags

from launch import common
from specjax.bench import workloads
from specjax.telemetry import progress_bar, say, summary_writer
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
    with (
        summary_writer(out / "tensorboard") as writer,
        progress_bar("answering", progress.rows, progress.total, "row") as shown,
    ):
        for progress in steps:
            shown.set_postfix_str(f"{progress.tokens_per_second:.0f} tokens/s", refresh=False)
            shown.update(progress.rows - shown.n)
            writer.add_scalar("distill/tokens_per_second", progress.tokens_per_second, progress.rows)
            writer.add_scalar("distill/tokens", progress.answer_tokens, progress.rows)
    report(progress)
    print(f"written: {out}")
    print("see:", shlex.join(["tensorboard", "--logdir", str(out)]))
    train = ["python", "-m", "launch.train", "--config=configs/medusa.py"]
    same = common.flags_of(setup, "target", "tokenizer", "dtype", "template_args")
    print("next:", shlex.join([*train, *same, f"--data={out}", "--workdir=runs/medusa"]))


def report(progress: distill.Progress) -> None:
    finishes = ", ".join(f"{count} by {reason}" for reason, count in sorted(progress.finishes.items()))
    print(f"{progress.rows} of {progress.prompts} prompts answered, {progress.answer_tokens} tokens ({finishes})")
    for reason, count in progress.dropped.items():
        print(f"  left out: {count} {reason}")


if __name__ == "__main__":
    common.main(run)
