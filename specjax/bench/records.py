"""From timed turns to figures: one record per workload, method, batch size and temperature, as in results.json."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specjax.bench.lossless import Comparison
from specjax.bench.timing import Turn, pooled
from specjax.costs import CostTable
from specjax.decode.engine import Engine
from specjax.decode.request import GenerationStats

RESAMPLES = 2000
PERCENTILES = (50, 95, 99)
Batches = list[list[Turn]]  # a method's turns, batch by batch


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload at one batch size and temperature under every method, "eager" among them."""

    workload: str
    batch_size: int
    temperature: float
    turns: dict[str, Batches]
    comparisons: dict[str, Comparison]
    compiled: dict[str, tuple[float, int]]  # seconds and programs so far, at this batch size


def record(cell: Cell, method: str, floor_ms: float | None, costs: CostTable | None, engine: Engine) -> dict:
    """One run of results.json. `floor_ms`: the time that reading the parameters once takes, if it is known; `costs`:
    the prices of a cycle of `engine`, if a table was given."""
    batches, comparison = cell.turns[method], cell.comparisons[method]
    turns = [turn for batch in batches for turn in batch]
    stats = pooled([turn.stats for turn in turns])
    decode = sum(turn.mean_decode_seconds for turn in turns)
    requests = [latencies(turn, row) for turn in turns for row in range(len(turn.prompts))]
    first, between, whole = (np.array(column) for column in zip(*requests))
    # A request of one token has no time between tokens.
    between = between[np.isfinite(between)]
    samples = decode_samples(cell, method)
    return {
        "workload": cell.workload,
        "method": method,
        "batch_size": cell.batch_size,
        "temperature": cell.temperature,
        "prompts": sum(len(batch[0].prompts) for batch in batches),
        "requests": len(requests),
        "prompt_tokens": sum(len(ids) for turn in turns for ids in turn.prompts),
        "new_tokens": sum(turn.new_tokens for turn in turns),
        "decode_tokens": stats.emitted,
        "decode_seconds": decode,
        "end_to_end_seconds": decode + sum(turn.prefill_seconds for turn in turns),
        "tokens_per_second": stats.emitted / decode if decode else None,
        "speedup": ratio(samples),
        "speedup_interval": interval([samples]),
        "predicted_speedup": predicted_speedup(costs, method, engine, turns, cell.batch_size),
        "end_to_end_speedup": ratio(end_to_end_samples(cell, method)),
        "end_to_end_interval": interval([end_to_end_samples(cell, method)]),
        **acceptance(stats),
        "draft_levels_per_cycle": stats.levels_per_cycle,
        "mean_block": stats.mean_over_passes(engine.drafter.blocks),
        "time_to_first_token_ms": percentiles(first),
        "inter_token_ms": percentiles(between),
        "request_ms": percentiles(whole),
        "lossless": comparison.lossless,
        "identical": comparison.identical / comparison.compared if comparison.compared else None,
        "ties": [dataclasses.asdict(tie) for tie in comparison.ties],
        "differences": list(comparison.failures),
        "eager_share_of_floor": floor_ms and floor_ms / eager_cycle_ms(cell),
        "before_loop": acceptance(pooled([turn.before_loop for turn in turns]))
        | {"looping": sum(turn.looping for turn in turns)},
        "compile_seconds": cell.compiled[method][0],
        "compiled_programs": cell.compiled[method][1],
        "peak_memory_bytes": max((t.memory_bytes for t in turns if t.memory_bytes is not None), default=None),
    }


def predicted_speedup(
    costs: CostTable | None, method: str, engine: Engine, turns: Sequence[Turn], batch_size: int
) -> float | None:
    """What the cost table makes of the measured acceptance: tokens per cycle over the price of a cycle, in passes over
    one token. A draft of fewer levels than the drafter's depth is priced as so much cheaper."""
    stats = pooled([turn.stats for turn in turns])
    if costs is None or method not in costs.drafts or not stats.cycles:
        return None
    lengths = [len(ids) + turn.new_tokens // len(turn.prompts) for turn in turns for ids in turn.prompts]
    context = engine.bucket(int(np.mean(lengths)))
    one, *blocks = (costs.target_ms(tokens, batch_size, context) for tokens in (1, *engine.drafter.blocks))
    draft = costs.draft_ms(method, batch_size, context)
    if stats.levels:
        draft *= stats.levels_per_cycle / engine.drafter.depth
    return stats.tokens_per_cycle * one / (stats.mean_over_passes(blocks) + draft)


def acceptance(stats: GenerationStats) -> dict:
    """The figures of a draft, pooled over cycles and each under its own name; prefill's token belongs to no cycle.

    `acceptance_by_depth` is a share of all cycles, `conditional_...` one of the cycles that came so far.
    """
    return {
        "cycles": stats.cycles,
        "tokens_per_cycle": stats.tokens_per_cycle,
        "accepted_per_cycle": stats.accepted_per_cycle,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "conditional_acceptance_by_depth": stats.conditional_acceptance_by_depth,
    }


def latencies(turn: Turn, row: int) -> tuple[float, float, float]:
    """Milliseconds of a request: to its first token, between its tokens, and until its whole batch has ended.

    A decode is one dispatch, so nobody saw its tokens come: the time between them is the time per cycle of the
    batch times the row's cycles, over its tokens; NaN for a request that ended with its first token.
    """
    stats = turn.results[0][row].stats
    cycles = max(result.stats.cycles for result in turn.results[0])
    decode = turn.mean_decode_seconds
    between = decode / cycles * stats.cycles / stats.emitted if stats.emitted else math.nan
    return 1e3 * turn.prefill_seconds, 1e3 * between, 1e3 * (turn.prefill_seconds + decode)


def percentiles(values: np.ndarray) -> dict[str, float | None]:
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else None for p in PERCENTILES}


def eager_cycle_ms(cell: Cell) -> float:
    """Milliseconds of the baseline's decode loop per target pass."""
    turns = [turn for batch in cell.turns["eager"] for turn in batch]
    cycles = sum(max(result.stats.cycles for result in turn.results[0]) for turn in turns)
    return 1e3 * sum(turn.mean_decode_seconds for turn in turns) / max(cycles, 1)


def decode_samples(cell: Cell, method: str) -> np.ndarray:
    """Per batch [n, 4]: decode tokens and seconds of the method, and of eager on the same prompts.

    For eager itself: its first decode against its last, which is the noise floor of every speed-up.
    """
    leg = {"eager": (0, -1)}.get(method)

    def side(batch: list[Turn], which: int) -> tuple[int, float]:
        seconds = (t.decode_seconds[leg[which]] if leg else t.mean_decode_seconds for t in batch)
        return sum(turn.stats.emitted for turn in batch), sum(seconds)

    pairs = zip(cell.turns[method], cell.turns["eager"], strict=True)
    return np.array([[*side(ours, 0), *side(theirs, 1)] for ours, theirs in pairs], float)


def end_to_end_samples(cell: Cell, method: str) -> np.ndarray:
    """The same with prefill, and its token, counted in."""

    def side(batch: list[Turn]) -> tuple[int, float]:
        return sum(t.new_tokens for t in batch), sum(t.prefill_seconds + t.mean_decode_seconds for t in batch)

    pairs = zip(cell.turns[method], cell.turns["eager"], strict=True)
    return np.array([[*side(ours), *side(theirs)] for ours, theirs in pairs], float)


def ratio(samples: np.ndarray) -> float | None:
    """Tokens per second of the method over those of eager, from sums [..., 4]; None where nothing was decoded."""
    tokens, seconds, eager_tokens, eager_seconds = samples.sum(0)
    return float(tokens / seconds * eager_seconds / eager_tokens) if tokens and eager_tokens else None


def geometric_mean(workloads: Sequence[np.ndarray]) -> float | None:
    """The mean speed-up over workloads, each counting alike."""
    ratios = [value for samples in workloads if (value := ratio(samples))]
    return math.exp(np.mean(np.log(ratios))) if ratios else None


def interval(workloads: Sequence[np.ndarray], seed: int = 0) -> list[float] | None:
    """95 % of the geometric mean over `workloads` when their batches are drawn again, with replacement (bootstrap).

    Where each workload has one batch only, the workloads are drawn instead; None where there is just one batch.
    """
    rng = np.random.default_rng(seed)
    if max(map(len, workloads)) > 1:
        draws = np.mean([_log_ratios(samples, rng) for samples in workloads], axis=0)
    elif len(workloads) > 1:
        ratios = np.array([ratio(samples) or np.nan for samples in workloads])
        draws = np.nanmean(np.log(ratios)[rng.integers(0, len(ratios), (RESAMPLES, len(ratios)))], axis=1)
    else:
        return None
    low, high = np.exp(np.nanpercentile(draws, [2.5, 97.5]))
    return [float(low), float(high)] if np.isfinite([low, high]).all() else None


def _log_ratios(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of the ratio of sums [RESAMPLES] of batches [n, 4] drawn again."""
    sums = samples[rng.integers(0, len(samples), (RESAMPLES, len(samples)))].sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may hold nothing but texts of one token
        return np.log(sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2])


def summary(cells: Sequence[Cell]) -> list[dict]:
    """Per method, batch size and temperature the mean over all workloads; eager's is the noise floor."""
    rows = []
    for batch_size, temperature in dict.fromkeys((cell.batch_size, cell.temperature) for cell in cells):
        here = [cell for cell in cells if (cell.batch_size, cell.temperature) == (batch_size, temperature)]
        for method in here[0].turns:
            workloads = [decode_samples(cell, method) for cell in here]
            rows.append(
                {
                    "method": method,
                    "batch_size": batch_size,
                    "temperature": temperature,
                    "workloads": len(here),
                    "speedup": geometric_mean(workloads),
                    "speedup_interval": interval(workloads),
                }
            )
    return rows
