"""Continue a prompt with a target, eagerly or speculatively; the text is the same for all but `typical` methods.

    python -m launch.generate --config=configs/smollm2.py --prompt="Name three rivers."
    python -m launch.generate --config=configs/smollm2.py --method=lookup --prompt="Name three rivers." --stream
    python -m launch.generate --config=configs/smollm2.py --method=medusa:tree8=DIR --prompt="Name three rivers."
    python -m launch.generate --config=configs/smollm2.py --messages=chat.json --temperature=0.8 --seed=1 --json

Standard output holds the text (with --json one object per conversation), standard error everything else.
"""

import json
import time
from pathlib import Path

from absl import flags

from launch import common
from specjax import Engine, Result, Sampling
from specjax.bench import workloads
from specjax.costs import CostTable
from specjax.telemetry import say

flags.adopt_module_key_flags(common)
METHOD = flags.DEFINE_string(
    "method",
    "eager",
    "How to draft: eager, lookup or, with a trained draft, like medusa:tree8=DIR or eagle+lookup=DIR (without =DIR the "
    "one that is shipped for the target).",
)
DRAFT = flags.DEFINE_string("draft", None, "Folder of the trained draft; the same as --method=METHOD=DIR.")
PROMPT = flags.DEFINE_string("prompt", None, "The user's message.")
MESSAGES = flags.DEFINE_string(
    "messages", None, "JSON file: a list of {role, content}, the user's last; or JSONL: {messages} on each line."
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k likeliest tokens; 0 is off.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest tokens that make up p; 1 is off.")
SEED = flags.DEFINE_integer("seed", 0, "Fixes the text at any temperature, for every method.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to write.")
STOP = flags.DEFINE_multi_string("stop", [], "Text to stop before; may be given several times.")
IGNORE_END = flags.DEFINE_bool("ignore_end", False, "Go on past end tokens.")
JSON = flags.DEFINE_bool("json", False, "Print text, tokens, finish_reason and stats as one JSON object.")
STREAM = flags.DEFINE_bool("stream", False, "Print the text as it comes.")


def run() -> None:
    ((method, draft),) = chosen_method()
    conversations = read_conversations()
    wish = sampling()
    if JSON.value and STREAM.value:
        raise ValueError("--json prints one object at the end and --stream the text as it comes; give one of them")
    setup = common.setup(common.CONFIG.value)
    engine = setup.open(method, draft)
    say(common.device_line(engine))
    stream = (lambda row, piece: print(piece, end="", flush=True)) if STREAM.value else None
    for number, conversation in enumerate(conversations):
        engine.encode(conversation, "the prompt" if len(conversations) == 1 else f"conversation {number + 1}")
    for conversation in conversations:
        compiled, start = engine.programs.compile_seconds, time.perf_counter()
        (result,) = engine.generate([conversation], wish, stream=stream)
        seconds = time.perf_counter() - start - (engine.programs.compile_seconds - compiled)
        print("" if STREAM.value else json.dumps(as_json(result)) if JSON.value else result.text, flush=True)
        say(summary(method, result, seconds))
        if engine.costs is not None and method != "eager":
            say(predicted(engine.costs, method, engine, result))


def chosen_method() -> list[tuple[str, str | None]]:
    """--method, with --draft as the folder of its draft."""
    if DRAFT.value is not None and "=" in METHOD.value:
        raise ValueError(f"--method={METHOD.value} and --draft={DRAFT.value} both name a draft; give one of them")
    chosen = common.parse_methods(METHOD.value if DRAFT.value is None else f"{METHOD.value}={DRAFT.value}")
    if len(chosen) > 1:
        raise ValueError(f"--method={METHOD.value} names {len(chosen)} methods; give one, or use launch.bench")
    return chosen


def sampling() -> Sampling:
    return Sampling(
        max_new_tokens=MAX_NEW_TOKENS.value,
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        seed=SEED.value,
        stop=tuple(STOP.value),
        ignore_end=IGNORE_END.value,
    )


def read_conversations() -> list[str | list[dict]]:
    """The prompt, the messages of a JSON file, or those of each line of a JSONL file.

    Raises ValueError or FileNotFoundError naming file and line.
    """
    if (PROMPT.value is None) == (MESSAGES.value is None):
        raise ValueError("give the text by --prompt=TEXT or by --messages=FILE, one of them")
    if PROMPT.value is not None:
        return [PROMPT.value]
    path = Path(MESSAGES.value)
    if path.suffix == ".jsonl":
        return [one_answer(path, prompt) for prompt in workloads.load(str(path))]
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}); JSONL needs a name that ends in .jsonl") from error
    well_formed = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
    if not well_formed or messages[-1]["role"] != "user":
        raise ValueError(f"{path} must hold a list of {{role, content}} whose last role is user")
    return [messages]


def one_answer(path: Path, prompt: workloads.Prompt) -> list[dict]:
    if len(prompt.turns) > 1:
        raise ValueError(f"{path} has several user turns to answer in {prompt.id}; launch.bench runs such rows")
    return [*prompt.history, {"role": "user", "content": prompt.turns[0]}]


def as_json(result: Result) -> dict:
    counts = ("cycles", "emitted", "drafted", "accepted")
    names = (*counts, "tokens_per_cycle", "accepted_per_cycle", "acceptance_by_depth")
    stats = {name: getattr(result.stats, name) for name in names}
    return {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason, "stats": stats}


def summary(method: str, result: Result, seconds: float) -> str:
    """One line: what was written, how fast (compiling not counted, the prompt's pass is), and why it ended."""
    count = len(result.tokens)
    why = "an end token or stop text" if result.finish_reason == "stop" else "the token limit"
    why = "the context limit" if result.context_full else why
    return (
        f"{method}: {result.prompt_tokens} prompt tokens, {count} new in {seconds:.2f} s, "
        f"{count / seconds:.1f} tokens/s, {result.stats.tokens_per_cycle:.2f} tokens per cycle, ended by {why}"
    )


def predicted(costs: CostTable, method: str, engine: Engine, result: Result) -> str:
    """What the cost table says of a cycle that runs the drafter's whole block in this text's cache bucket."""
    block, slots = engine.drafter.blocks[-1], engine.bucket(result.prompt_tokens + len(result.tokens))
    draft_ms = costs.draft_ms(method, 1, slots) if method in costs.drafts else 0.0
    need = costs.break_even(block, 1, slots, draft_ms)
    return f"cost table: a cycle over {block} tokens pays from {need:.2f} tokens on"


if __name__ == "__main__":
    common.main(run)
