"""What a benchmark tells people: tables, pictures, TensorBoard, one sentence. `results`: what results.json holds."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from specjax.bench import plots
from specjax.telemetry import summary_writer, write_json, write_text

Setting = tuple[int, float]  # batch size, temperature
PICTURES: dict[str, Callable[[Sequence[dict], str], Figure]] = {
    "speedup": plots.speedups,
    "tokens_per_cycle": plots.tokens_per_cycle,
    "acceptance": plots.acceptance,
}
COLUMNS = (
    "workload", "method", "speed up", "95 % interval", "", "tokens /cycle", "tokens /s", "eager /s", "n", "same text",
)  # fmt: skip
MEAN = "geometric mean"
SCALARS = (
    "speedup",
    "predicted_speedup",
    "end_to_end_speedup",
    "tokens_per_second",
    "tokens_per_cycle",
    "accepted_per_cycle",
    "draft_levels_per_cycle",
    "mean_block",
    "draft_acceptance_rate",
    "identical",
)


def write(results: dict, folder: Path) -> None:
    """Write results.json, report.md, the pictures and TensorBoard's events into `folder`."""
    write_json(folder / "results.json", results)
    with summary_writer(folder) as writer:
        for setting in settings(results):
            runs, where = of_setting(results["runs"], setting), slug(setting)
            for name, draw in PICTURES.items() if drafts(results, setting) else ():
                figure = draw(runs, caption(results, setting))
                figure.savefig(folder / f"{name}-{where}.png", dpi=150)
                writer.add_figure(f"{where}/{name}", figure, close=False)
            for run in runs:
                method = re.sub("[:+]", "_", run["method"])  # which TensorBoard's names may not have
                for name in SCALARS:
                    if run[name] is not None:
                        writer.add_scalar(f"{where}/{name}/{method}/{run['workload']}", run[name], 0)
        report = markdown(results)
        writer.add_text("report", report, 0)
    write_text(folder / "report.md", report)


def show(results: dict, console: Console) -> None:
    """Print one table per batch size and temperature, what is wrong, and the sentence."""
    for setting in settings(results):
        console.print(f"\n{caption(results, setting)}", style="bold", soft_wrap=True)
        grid = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for name in COLUMNS:
            left = name in ("workload", "method", "", "same text")
            grid.add_column("\n".join(name.rsplit(" ", 1)), justify="left" if left else "right", no_wrap=True)
        for row in table(results, setting):
            style = "bold" if row[0] == MEAN else "red" if "slower" in row else None
            grid.add_row(*row, style=style)
        console.print(grid)
        for line in work(results, setting):
            console.print(line, soft_wrap=True)
    for warning in warnings(results):
        console.print(f"[bold red]{warning}[/]", soft_wrap=True)
    console.print(sentence(results), style="bold", soft_wrap=True)


def table(results: dict, setting: Setting) -> list[list[str]]:
    """COLUMNS of one row per workload and method, then of the means over workloads."""
    runs = of_setting(results["runs"], setting)
    means = of_setting(results["summary"], setting)
    eager = {run["workload"]: run for run in runs if run["method"] == "eager"}
    drafting = [run for run in runs if run["method"] != "eager"]
    rows = []
    for run in drafting or runs:
        rows.append([run["workload"], run["method"], *speedup(run), number(run["tokens_per_cycle"], 2)])
        rows[-1] += [number(run["tokens_per_second"], 1), number(eager[run["workload"]]["tokens_per_second"], 1)]
        rows[-1] += [str(run["prompts"]), lossless(run)]
    for row in sorted(means, key=lambda row: row["method"] == "eager"):
        rows.append([MEAN, row["method"], *speedup(row), "", "", "", "", ""])
    return rows


def work(results: dict, setting: Setting) -> list[str]:
    """What the cycles of each drafting method did, from the workload where it is least to the one where it is most."""
    runs = [run for run in of_setting(results["runs"], setting) if run["method"] != "eager"]

    def span(method: str, figure: str) -> str:
        found = [run[figure] for run in runs if run["method"] == method]
        return " to ".join(dict.fromkeys(number(bound(found), 1) for bound in (min, max)))

    figures = {"draft levels per cycle": "draft_levels_per_cycle", "mean block": "mean_block"}
    return [
        f"{method}: {', '.join(f'{name} {span(method, figure)}' for name, figure in figures.items())}"
        for method in dict.fromkeys(run["method"] for run in runs)
    ]


def markdown(results: dict) -> str:
    """The report: the sentence, one table per setting with its pictures, how it was measured."""
    lines = ["# Benchmark", "", sentence(results), ""]
    lines += [f"**{warning}**\n" for warning in warnings(results)]
    for setting in settings(results):
        lines += [f"## {caption(results, setting)}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [*map(_line, table(results, setting)), "", *(f"{line}\n" for line in work(results, setting))]
        lines += [f"![{name}]({name}-{slug(setting)}.png)\n" for name in PICTURES if drafts(results, setting)]
    lines += ["## How it was measured", ""]
    lines += [f"- {name}: {value}" for name, value in results["environment"].items() if name != "config"]
    lines += [
        "",
        "Speed-ups are over eager in the same run, decoded before and after (eager, method, method, eager), without "
        "prefill and compilation; intervals are 95 %, by drawing the prompts again (the workloads, where each has one "
        "batch). *slower* and *faster* are said where the whole interval is on one side of 1, *slower?* and *faster?* "
        "where it is not. Tokens per cycle count the target's own (bonus) token. A text is the same if its tokens are "
        "eager's, or differ by the ties listed; law-tested methods keep the target's law when sampling, not the text.",
        "",
    ]
    return "\n".join(lines)


def sentence(results: dict) -> str:
    """The best method for these prompts, its speed-up and the workloads that lose; or that none pays."""
    drafting = [row for row in results["summary"] if row["method"] != "eager" and row["speedup"]]
    different = sorted({run["method"] for run in results["runs"] if run["lossless"] == "no"})
    left_out = f"; {', '.join(different)} left out: not lossless" if different else ""
    fit = [row for row in drafting if row["method"] not in different]
    if not fit:
        none = "nothing was decoded to time it by" if len(results["summary"]) > 1 else "none but eager was measured"
        return f"No method can be recommended{left_out or f', since {none}'}."
    best = max(fit, key=lambda row: row["speedup"])
    noise = next(row for row in of_setting(results["summary"], place(best)) if row["method"] == "eager")
    figure = f"{best['method']} at {words(best)} is {times(best)} eager's speed (eager against itself: {times(noise)})"
    if best["speedup"] <= 1:
        return f"Nothing pays for these prompts: the best, {figure}, so decode eagerly{left_out}."
    # Without an interval the noise alone decides.
    low = (best["speedup_interval"] or [best["speedup"]])[0]
    noisiest = max(filter(None, [noise["speedup"], *(noise["speedup_interval"] or ())]), default=1.0)
    start = "No clear gain" if low <= 1 or best["speedup"] <= noisiest else "Best"
    return f"{start} for these prompts: {figure}; {losses(results, best, fit)}{left_out}."


def losses(results: dict, best: dict, rows: Sequence[dict]) -> str:
    """Where the best method is slower than eager: workloads of its setting, and other settings."""
    runs = [run for run in of_setting(results["runs"], place(best)) if run["method"] == best["method"]]
    losing = [run["workload"] for run in runs if (run["speedup"] or 1) < 1]
    others = [row for row in rows if row["method"] == best["method"] and row is not best and row["speedup"] < 1]
    elsewhere = [f"; at {words(row)} it is {times(row)}" for row in others]
    return f"it loses on {', '.join(losing) or 'no workload'}" + "".join(elsewhere)


def warnings(results: dict) -> list[str]:
    """Texts that differ, texts that nobody compared, and listed ties."""
    lines = []
    for run in results["runs"]:
        where = f"{run['method']} on {run['workload']} at {words(run)}"
        if run["lossless"] == "no":
            lines.append(f"NOT LOSSLESS: {where}: {'; '.join(run['differences'])}")
        if run["lossless"] == "not compared":
            lines.append(f"not compared with eager, so not called lossless: {where}")
        for tie in run["ties"]:
            lines.append(
                f"tie: {where}: {tie['prompt']}, new token {tie['position']}: {tie['got']} for {tie['expected']}, "
                f"{tie['gap']:.2g} apart"
            )
    return lines


def verdict(run: dict) -> str:
    """A speed-up in a word; the question mark says that the interval does not settle it."""
    low, high = run["speedup_interval"] or [0, math.inf]
    if run["speedup"] < 1:
        return "slower" if high < 1 else "slower?"
    return "faster" if low > 1 else "faster?"


def times(run: dict) -> str:
    """`1.25× [1.10, 1.41]`"""
    if run["speedup"] is None:
        return "not measurable"
    span = run["speedup_interval"]
    interval = f"[{span[0]:.2f}, {span[1]:.2f}]" if span else "(one batch: no interval)"
    return f"{run['speedup']:.2f}× {interval}"


def speedup(run: dict) -> list[str]:
    """Speed-up, its interval and the verdict, as cells of a table."""
    if run["speedup"] is None:
        return ["–", "", "nothing to time"]
    span = run["speedup_interval"]
    word = "NOT LOSSLESS" if run.get("lossless") == "no" else "(noise)" if run["method"] == "eager" else verdict(run)
    return [f"{run['speedup']:.2f}×", f"{span[0]:.2f}–{span[1]:.2f}" if span else "one batch", word]


def lossless(run: dict) -> str:
    """The verdict in words, with the share of equal texts where it is not all of them."""
    ties = f", {len(run['ties'])} ties" if run["ties"] else ""
    share = f" ({run['identical']:.0%} identical{ties})" if run["identical"] not in (1.0, None) else ""
    return {"tokens-equal": "yes", "no": "NO"}.get(run["lossless"], run["lossless"]) + share


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def place(row: dict) -> Setting:
    return row["batch_size"], row["temperature"]


def words(row: dict) -> str:
    return f"batch {row['batch_size']}, temperature {row['temperature']:g}"


def settings(results: dict) -> list[Setting]:
    return list(dict.fromkeys(map(place, results["summary"])))


def of_setting(rows: Sequence[dict], setting: Setting) -> list[dict]:
    return [row for row in rows if place(row) == setting]


def drafts(results: dict, setting: Setting) -> bool:
    """Whether there is more than the baseline to show."""
    return any(row["method"] != "eager" for row in of_setting(results["summary"], setting))


def slug(setting: Setting) -> str:
    return f"batch{setting[0]}-temperature{setting[1]:g}"


def caption(results: dict, setting: Setting) -> str:
    about = results["environment"]
    return (
        f"{about['target_name']}, {about['dtype']}, {about['device']} ({about['cores']} cores), batch {setting[0]}, "
        f"temperature {setting[1]:g}"
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
