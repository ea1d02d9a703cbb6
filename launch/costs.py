"""Measure what a target pass and a draft cost here, and what a draft must reach to pay, before any is trained.

    python -m launch.costs --config=configs/smollm2.py --out=costs.json
    python -m launch.costs --config=configs/smollm2.py --out=costs.json --batch_sizes=1,4,8 --contexts=512,2048

The table is for this device, dtype and target. --cost_table=costs.json then tells the other scripts.
"""

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Mapping

from absl import flags
from rich.console import Console
from rich.table import Table

from launch import common
from specjax.bench import passes
from specjax.costs import CostTable
from specjax.telemetry import say

flags.adopt_module_key_flags(common)
OUT = flags.DEFINE_string("out", None, "JSON file to write.", required=True)
BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["1", "4"], "Rows decoded together.")
CONTEXTS = flags.DEFINE_list("contexts", ["512"], "Cache slots a row.")
BLOCKS = flags.DEFINE_list("blocks", ["1", "2", "4", "8", "16", "32"], "Tokens of each row in one target pass.")
METHODS = flags.DEFINE_string("methods", "lookup", "Whose draft to time, like lookup,medusa:tree8=DIR.")
REPEATS = flags.DEFINE_integer("repeats", 15, "Rounds; the median of each figure is kept.")
CYCLES = flags.DEFINE_bool("cycles", True, "Time whole decode loops too.")


def run() -> None:
    sizes = {flag.name: integers(flag) for flag in (BATCH_SIZES, CONTEXTS, BLOCKS)}
    methods = common.parse_methods(METHODS.value)
    setup = common.setup(common.CONFIG.value)
    if setup.cost_table is not None:
        raise ValueError(
            f"--cost_table={setup.cost_table} is read by the other scripts; name the file to write by --out"
        )
    common.check_writable(OUT.value)
    engine = setup.open()
    say(common.device_line(engine))
    table = passes.measure(
        engine,
        sizes["batch_sizes"],
        sizes["contexts"],
        sizes["blocks"],
        methods,
        repeats=REPEATS.value,
        cycles=CYCLES.value,
    )
    command = shlex.join(["python", "-m", "launch.costs", *sys.argv[1:]])
    table = dataclasses.replace(
        table, environment={**table.environment, "command": command, "config": dataclasses.asdict(setup)}
    )
    table.save(OUT.value)
    report(table, engine.target.name)
    print(f"written: {OUT.value}")
    bench = ["python", "-m", "launch.bench", "--config=configs/bench.py", *common.flags_of(setup)]
    print("next:", shlex.join([*bench, "--methods=eager,lookup", f"--cost_table={OUT.value}", "--out=runs/bench"]))


def integers(flag: flags.FlagHolder) -> list[int]:
    """`--batch_sizes=1,4` -> [1, 4], ascending; ValueError names the flag if one is no positive integer."""
    sizes = common.numbers(flag, int)
    if min(sizes, default=0) < 1:
        raise ValueError(f"--{flag.name} is {','.join(flag.value)!r}; give positive integers like 1,4,8")
    return sorted(set(sizes))


def report(table: CostTable, target: str) -> None:
    """The table for people, and in words where speculation can pay."""
    Console().print(result_table(table, target))
    print(
        f"floor: {table.weight_bytes / 1e6:.0f} MB of weights read once at {table.bandwidth / 1e9:.1f} GB/s: "
        f"{table.floor_ms:.1f} ms"
    )
    print("break-even: tokens per cycle (bonus token included) above which such a draft beats eager decoding")
    for context in table.contexts:
        print(verdict(table, context))
    if table.cycles:
        print(cycles_line(table.cycles))


def cycles_line(ms: Mapping[str, float]) -> str:
    return (
        f"eager loop: {ms['eager_ms_per_token']:.1f} ms a token, {ms['eager_over_pass']:.2f} x the bare pass; "
        f"lookup cycle over a full block: {ms['lookup_ms_per_cycle']:.1f} ms, "
        f"{ms['lookup_over_pass_and_draft']:.2f} x pass and draft, and sampling (top-p 0.9) "
        f"{ms['lookup_ms_per_cycle_sampled']:.1f} ms, {ms['lookup_over_pass_and_draft_sampled']:.2f} x"
    )


def result_table(table: CostTable, target: str) -> Table:
    """A row per batch, context and block; the break-even is a dash where even the whole block is too few."""
    pays = [f"break-even, {method} draft" for method in ("free", *table.drafts)]
    shown = Table("batch", "context", "tokens", "ms", "x floor", *pays)
    shown.title = f"{target}: a target pass over so many tokens a row"
    for batch, context in itertools.product(table.batches, table.contexts):
        draft_ms = [0.0, *(table.draft_ms(method, batch, context) for method in table.drafts)]
        for block in table.blocks:
            ms = table.target_ms(block, batch, context)
            need = [table.break_even(block, batch, context, each) for each in draft_ms]
            cells = [f"{n:.2f}" if n < block else "-" for n in need]
            shown.add_row(str(batch), str(context), str(block), f"{ms:.1f}", f"{ms / table.floor_ms:.2f}", *cells)
        shown.add_section()
    for method, point in itertools.product(table.drafts, itertools.product(table.batches, table.contexts)):
        shown.add_row(*map(str, point), method, f"{table.draft_ms(method, *point):.2f}", "")
    return shown


def verdict(table: CostTable, context: int) -> str:
    last, most = table.last_paying_batch(context), table.batches[-1]
    if last is None:
        return f"{context} slots: no draft can pay at any batch size measured, even if it is free and always right."
    gain = f"one that is free and always right gains {table.ceiling(last, context):.1f} x"
    if last < most:
        return f"{context} slots: above batch {last} no draft can pay; at batch {last} {gain}."
    return f"{context} slots: a draft can still pay at batch {most}, the largest of --batch_sizes: {gain}."


if __name__ == "__main__":
    common.main(run)
