"""Methods x workloads x batch sizes x temperatures: warm up, choose how many prompts fit, measure, compare."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from tqdm import tqdm

from specjax.bench import timing
from specjax.bench.lossless import FLOAT32_BOUND, Comparison, Scorer
from specjax.bench.passes import bytes_per_pass, read_bytes, read_jobs
from specjax.bench.records import Batches, Cell, record, summary
from specjax.bench.timing import Turn, measure_batch
from specjax.bench.workloads import Prompt
from specjax.costs import CostTable
from specjax.decode.engine import Engine
from specjax.decode.request import Sampling
from specjax.decode.target import Target
from specjax.telemetry import say

NOISE_TEXTS, FLOOR_ROUNDS = 3, 8
OVERHEAD = 1.15  # all that is not timed over what is: copies, and decoding texts that loop once more


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured. `minutes`: the time that all of it may take, warm-up included (0: as long as it takes)."""

    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 128
    seed: int = 0
    minutes: float = 0.0

    def __post_init__(self):
        if not self.batch_sizes or any(size < 1 for size in self.batch_sizes):
            raise ValueError(f"batch sizes {self.batch_sizes} must be 1 or more")
        if not self.temperatures:
            raise ValueError("no temperature is given; 0 is greedy")
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; a decode to be timed needs 2 or more")
        if self.minutes < 0:
            raise ValueError(f"minutes is {self.minutes}; give the time the benchmark may take, or 0 for no limit")
        for temperature in self.temperatures:
            Sampling(temperature=temperature)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds per prompt token of prefill and per new token of decode, of all engines and both decodes together."""

    prefill: float
    decode: float


def run(
    engines: Mapping[str, Engine], prompts: Sequence[Prompt], plan: Plan, costs: CostTable | None = None
) -> Iterator[dict]:
    """Measure every engine against engines["eager"]; after each workload yields all so far: {"environment" (what was
    found out about it), "prompts" (the ones in use), "summary", "runs"}. With `costs` the runs say what it predicts.

    Raises ValueError naming a prompt that does not fit the context, before anything is compiled.
    """
    bench = _Bench(engines, plan)
    workloads: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        workloads.setdefault(prompt.task, []).append(prompt)
    lengths = {name: [len(bench.encode(prompt)) for prompt in group] for name, group in workloads.items()}
    started = timing.clock()
    floor = floor_ms(engines["eager"].target)
    # Where the number of prompts follows from the time, only the first of each workload is sure to be used.
    sure = {name: group[:1] if plan.minutes else group for name, group in workloads.items()}
    known = [pair for name in sure for pair in zip(lengths[name], sure[name])]
    ends = [choose(known, key=lambda pair: pair[0])[1] for choose in (min, max)]
    paces = {size: bench.warm_up(*ends, size) for size in plan.batch_sizes}
    if plan.minutes:
        budget = 60 * plan.minutes - (timing.clock() - started)
        workloads = _that_fit(workloads, lengths, paces, plan, budget)
    used = [prompt for group in workloads.values() for prompt in group]
    cells, runs = [], []
    grid = list(itertools.product(plan.batch_sizes, plan.temperatures))
    with tqdm(total=len(used) * len(grid), unit="prompt", desc="bench") as progress:
        for (batch_size, temperature), workload in itertools.product(grid, workloads):
            progress.set_postfix_str(f"{workload}, batch {batch_size}, temperature {temperature:g}")
            cells.append(bench.cell(workload, workloads[workload], batch_size, temperature, progress))
            runs += [record(cells[-1], name, floor, costs, engine) for name, engine in bench.engines.items()]
            means = summary(cells)
            about = {
                "floor_ms": floor,
                "noise_floor": [row for row in means if row["method"] == "eager"],
                "tie_bounds": {f"batch {size}": bound for size, bound in bench.bounds.items()},
            }
            yield {"environment": about, "prompts": used, "summary": means, "runs": list(runs)}


def floor_ms(target: Target) -> float:
    """Milliseconds that reading the parameters once takes, at the bandwidth measured now: no pass is faster."""
    jobs = read_jobs(target).values()
    seconds = min(job.seconds() for _ in range(FLOOR_ROUNDS) for job in jobs)
    return 1e3 * seconds * bytes_per_pass(target) / read_bytes(target)


def _that_fit(
    workloads: Mapping[str, list[Prompt]],
    lengths: Mapping[str, list[int]],
    paces: Mapping[int, Pace],
    plan: Plan,
    budget: float,
) -> dict[str, list[Prompt]]:
    """The workloads with as many prompts each as `budget` seconds allow, one at least."""

    def seconds(number: int, size: int, name: str) -> float:
        """Measuring the first `number` prompts of one workload at one batch size and temperature."""
        total, group = 0.0, workloads[name][:number]
        for first in range(0, len(group), size):
            turns = len(group[first].turns) if size == 1 else 1
            total += paces[size].prefill * max(lengths[name][:number][first : first + size])
            total += paces[size].decode * plan.max_new_tokens * turns
        return total

    def whole(number: int) -> float:
        per_temperature = sum(seconds(number, size, name) for size in paces for name in workloads)
        return OVERHEAD * len(plan.temperatures) * per_temperature

    most = max(map(len, workloads.values()))
    number = next((n for n in range(most, 1, -1) if whole(n) <= budget), 1)
    say(
        f"{number} of up to {most} prompts per workload in {plan.minutes:g} minutes: "
        f"they take about {whole(number):.0f} s of the {max(budget, 0):.0f} s that are left"
    )
    return {name: group[:number] for name, group in workloads.items()}


class _Bench:
    """The engines of one benchmark and what is known of them so far."""

    def __init__(self, engines: Mapping[str, Engine], plan: Plan):
        if "eager" not in engines:
            raise ValueError("every method is measured against eager: name it among the methods")
        self.engines = {"eager": engines["eager"], **engines}
        self._plan = plan
        self._compiled: dict[tuple[str, int], tuple[float, int]] = {}
        self._scorers: dict[int, Scorer] = {}
        self.bounds: dict[int, float] = {}

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's first turn as token ids. Raises ValueError if it is too long."""
        return self.engines["eager"].encode([*prompt.history, {"role": "user", "content": prompt.turns[0]}], prompt.id)

    def warm_up(self, shortest: Prompt, longest: Prompt, batch_size: int) -> Pace:
        """Compile all that texts up to the longest need at this batch size, and run both of these prompts.

        A larger bucket that only a later turn needs is met later; that turn is then decoded again to be timed.
        """
        say(f"warming up at batch {batch_size} with the shortest prompt, {shortest.id}, and the longest, {longest.id}")
        limit, length = self._plan.max_new_tokens, len(self.encode(longest))
        data = self.engines["eager"].target.mesh.shape["data"]
        rows = -(-batch_size // data) * data  # as many as an engine makes of them
        with self._counting(batch_size):
            for engine in self.engines.values():
                chunks = -(-length // engine.chunk) * engine.chunk
                needed = max(chunks, length + limit + engine.drafter.depth + 1)
                for slots in [engine.buckets[0], *(b for a, b in itertools.pairwise(engine.buckets) if a < needed)]:
                    for kind in ("prefill", "loop"):
                        engine.programs.compiled(kind, engine.abstract(rows, slots))
        wishes = [Sampling(max_new_tokens=limit, ignore_end=True)] * batch_size
        short, long = (self._measure([p] * batch_size, wishes, batch_size, turns=1) for p in (shortest, longest))
        prefill = sum(turn.prefill_seconds for (turn,) in long.values()) / len(long["eager"][0].prompts[0])
        decode = sum(sum(turn.decode_seconds) for (turn,) in short.values()) / limit
        return Pace(prefill, decode)

    def cell(self, workload: str, prompts: Sequence[Prompt], batch_size: int, temperature: float, progress) -> Cell:
        """Measure one workload and compare its texts."""
        turns: dict[str, Batches] = {name: [] for name in self.engines}
        spoken = max(len(prompt.turns) for prompt in prompts)
        if spoken > 1 and batch_size > 1:
            say(f"{workload}: at batch {batch_size} only the first of up to {spoken} turns is decoded")
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            seeds = range(self._plan.seed + first, self._plan.seed + first + len(batch))
            limit = self._plan.max_new_tokens
            wishes = [Sampling(max_new_tokens=limit, temperature=temperature, seed=seed) for seed in seeds]
            spoken = len(batch[0].turns) if batch_size == 1 else 1
            for name, done in self._measure(batch, wishes, batch_size, spoken).items():
                turns[name].append(done)
            progress.update(len(batch))
        comparisons = {name: self._compare(name, prompts, turns, batch_size, temperature) for name in self.engines}
        compiled = {name: self._compiled[name, batch_size] for name in self.engines}
        return Cell(workload, batch_size, temperature, turns, comparisons, compiled)

    def _measure(self, prompts, wishes, batch_size: int, turns: int) -> dict[str, list[Turn]]:
        with self._counting(batch_size):
            return measure_batch(self.engines, prompts, wishes, batch_size, turns)

    @contextlib.contextmanager
    def _counting(self, batch_size: int) -> Iterator[None]:
        """Keep count of what is compiled meanwhile, for this batch size."""
        before = {name: (e.programs.compile_seconds, len(e.programs)) for name, e in self.engines.items()}
        yield
        for name, engine in self.engines.items():
            seconds, count = self._compiled.get((name, batch_size), (0.0, 0))
            seconds += engine.programs.compile_seconds - before[name][0]
            self._compiled[name, batch_size] = seconds, count + len(engine.programs) - before[name][1]

    def _compare(
        self, name: str, prompts, turns: Mapping[str, Batches], batch_size: int, temperature: float
    ) -> Comparison:
        """All texts of a method against eager's first ones; none where the verifier promises no equal text."""
        verifier = self.engines[name].verifier
        if not verifier.lossless:
            return Comparison(failures=["its verifier does not keep the target's law; no text was compared"])
        if temperature and not verifier.seed_for_seed:
            return Comparison(law_tested=True)
        comparison = Comparison()
        scorer = self._scorers.setdefault(batch_size, Scorer(self.engines["eager"], batch_size))
        bound = self._bound(scorer, batch_size, turns["eager"])
        for number, (ours, theirs) in enumerate(zip(turns[name], turns["eager"], strict=True)):
            for turn, (mine, eager) in enumerate(zip(ours, theirs, strict=True)):
                for row, wish in enumerate(mine.wishes):
                    prompt = prompts[number * batch_size + row]
                    label = prompt.id if len(ours) == 1 else f"{prompt.id} turn {turn + 1}"
                    texts = [results[row].tokens for results in mine.results]
                    # Both decodes should agree; where they do not, neither is taken for the other.
                    got = next((text for text in texts if text != eager.results[0][row].tokens), texts[0])
                    scorer.compare(comparison, label, mine.prompts[row], eager.results[0][row].tokens, got, wish, bound)
        for failure in comparison.failures:
            say(f"NOT LOSSLESS, {name} at batch {batch_size}, temperature {temperature:g}: {failure}")
        return comparison

    def _bound(self, scorer: Scorer, batch_size: int, eager: Batches) -> float:
        """The gap of two logits under which rounding may swap them: given in float32, measured in bfloat16."""
        if batch_size not in self.bounds:
            if self.engines["eager"].target.dtype == jnp.float32:
                self.bounds[batch_size] = FLOAT32_BOUND
            else:
                blocks = sorted({size for e in self.engines.values() for size in e.drafter.blocks if size > 1})
                texts = [batch[0].prompts[0] + batch[0].results[0][0].tokens for batch in eager[:NOISE_TEXTS]]
                self.bounds[batch_size] = scorer.width_noise(texts, blocks)
                noise = f"{self.bounds[batch_size]:.3g} in the logits"
                say(f"width noise at batch {batch_size} over blocks of {blocks}: {noise}")
        return self.bounds[batch_size]
