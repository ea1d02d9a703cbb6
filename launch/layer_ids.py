"""Check by which convention an EAGLE-3 draft counts the target's layers, by how well it guesses on a few prompts.

    python -m launch.layer_ids --target=TARGET --draft=DIR --out=CORRECTED

Tokens per cycle with its states as they are read, one layer earlier and one later. Where another is clearly better
the draft is written again to --out with these states; without --out it ends with exit code 1.
"""

import sys

from absl import flags

from launch import common
from specjax.bench import layer_ids, workloads
from specjax.loading.eagle import load_eagle, save_eagle
from specjax.telemetry import say

flags.adopt_module_key_flags(common)
DRAFT = flags.DEFINE_string("draft", None, "Folder of the EAGLE-3 draft.", required=True)
PROMPTS = flags.DEFINE_string(
    "prompts", "chat,qa,translation", "Names of workloads, or a file: 4 prompts of each task."
)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 48, "Tokens to write for each prompt.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Folder to write the corrected draft to, if it needs correction.")


def run() -> None:
    draft = load_eagle(DRAFT.value)
    prompts = workloads.load(PROMPTS.value, 4)
    asked = [[*prompt.history, {"role": "user", "content": prompt.turns[0]}] for prompt in prompts]
    engine = common.setup(common.CONFIG.value).open()
    say(common.device_line(engine))
    drafts, found = layer_ids.shifted(draft, engine.target.config.layers), {}
    for shift, reached in layer_ids.tokens_per_cycle(engine, drafts, asked, MAX_NEW_TOKENS.value):
        found[shift] = reached
        print(f"states {', '.join(map(str, drafts[shift].taps))} ({shift:+d}): {reached:.3f} tokens per cycle")
    best = layer_ids.better(found)
    if best == 0:
        print(f"{DRAFT.value} reads the states that it was trained on")
        return
    print(f"{DRAFT.value} was trained on states {best:+d} from those that it reads")
    if OUT.value is None:
        sys.exit(1)
    save_eagle(OUT.value, drafts[best])
    print(f"written: {OUT.value}")


if __name__ == "__main__":
    common.main(run)
