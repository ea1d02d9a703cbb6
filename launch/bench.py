"""Methods x workloads x batch sizes x temperatures against eager decoding of the same prompts: what pays, and where.

    python -m launch.bench --config=configs/bench.py --methods=eager,lookup --workloads=all --out=runs/bench
    python -m launch.bench --config=configs/bench.py --methods=eager,lookup --workloads=chat,rag \\
        --prompts_per_workload=4 --max_new_tokens=64 --batch_size=1,4 --temperature=0,1 --out=runs/bench

results.json in --out is written anew after every workload, so that an interruption loses nothing that was measured.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags
from rich.console import Console

from launch import common
from specjax.bench import measure, report, workloads
from specjax.bench.workloads import Prompt
from specjax.costs import environment
from specjax.decode.engine import Engine
from specjax.decode.setup import Setup
from specjax.telemetry import say, write_json

SCHEMA_VERSION = 1
VERSIONS = ("specjax", "jax", "jaxlib", "flax")

flags.adopt_module_key_flags(common)
METHODS = flags.DEFINE_string(
    "methods",
    "eager,lookup",
    "Methods to measure, like medusa:tree8=DIR,eagle+lookup=DIR (without =DIR the draft that is shipped for the "
    "target); eager always is.",
)
WORKLOADS = flags.DEFINE_string("workloads", "all", "all, names like chat,rag, or a .jsonl or .json file of prompts.")
PROMPTS = flags.DEFINE_integer("prompts_per_workload", 10, "Most prompts of each workload.", lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to write for each prompt or turn.")
TEMPERATURE = flags.DEFINE_list("temperature", ["0"], "Temperatures, like 0,1; 0 is greedy.")
BATCH_SIZE = flags.DEFINE_list("batch_size", ["1"], "Batch sizes, like 1,4.")
SEED = flags.DEFINE_integer("seed", 0, "Prompt i of a workload has seed + i.", lower_bound=0)
MINUTES = flags.DEFINE_float("minutes", 0.0, "Use fewer prompts per workload, so that it takes about so long; 0: all.")
OUT = flags.DEFINE_string("out", None, "Folder for report.md, results.json, pictures and TensorBoard.", required=True)


def run() -> None:
    plan = measure.Plan(
        batch_sizes=tuple(dict.fromkeys(common.numbers(BATCH_SIZE, int))),
        temperatures=tuple(dict.fromkeys(common.numbers(TEMPERATURE, float))),
        max_new_tokens=MAX_NEW_TOKENS.value,
        seed=SEED.value,
        minutes=MINUTES.value,
    )
    methods = dict(common.parse_methods(METHODS.value))
    prompts = workloads.load(WORKLOADS.value, PROMPTS.value)
    setup = common.setup(common.CONFIG.value)
    common.check_writable(Path(OUT.value) / "results.json")
    engines = open_engines(setup, methods)
    say(common.device_line(engines["eager"]))
    costs = engines["eager"].costs
    folder, about = Path(OUT.value), describe(engines["eager"], setup)
    results = None
    try:
        for found in measure.run(engines, prompts, plan, costs):
            about |= found["environment"] | {"prompt_set_hash": prompt_set_hash(found["prompts"])}
            results = {
                "schema_version": SCHEMA_VERSION,
                "environment": about,
                "summary": found["summary"],
                "runs": found["runs"],
            }
            write_json(folder / "results.json", results)
    finally:
        if results is not None:  # also where somebody stopped it: what was measured is worth a report
            report.write(results, folder)
            report.show(results, Console())
            print(f"report: {folder / 'report.md'}\nresults: {folder / 'results.json'}\ntensorboard --logdir {folder}")


def open_engines(setup: Setup, methods: Mapping[str, str | None]) -> dict[str, Engine]:
    """An engine per method on one copy of the target, eager first."""
    eager = setup.open("eager")
    others = {name: eager.with_method(name, draft) for name, draft in methods.items() if name != "eager"}
    return {"eager": eager, **others}


def describe(engine: Engine, setup: Setup) -> dict:
    """What the figures depend on, and the command that repeats them."""
    return environment(engine.target.mesh, engine.target.dtype, engine.target.fingerprint) | {
        "target_name": engine.target.name,
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "command": " ".join(["python -m launch.bench", *sys.argv[1:]]),
        "config": dataclasses.asdict(setup) | {"template_args": dict(setup.template_args)},
        "max_new_tokens": MAX_NEW_TOKENS.value,
        "seed": SEED.value,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def prompt_set_hash(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits for the texts that were decoded."""
    return hashlib.sha256(json.dumps([dataclasses.asdict(prompt) for prompt in prompts]).encode()).hexdigest()[:16]


if __name__ == "__main__":
    common.main(run)
