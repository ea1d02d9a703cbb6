"""The benchmark: what it counts, what it times and when it calls a text lossless; then the whole of it once, small."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import scripted
from costs_test import table
from rich.console import Console
from scripted import FIELDS, save_target, target, tensors

from specjax import Engine, GenerationStats, Sampling, load_target
from specjax.bench import loops, measure, records, report, timing
from specjax.bench.lossless import FLOAT32_BOUND, Comparison, Scorer
from specjax.bench.workloads import Prompt
from specjax.drafters.lookup import Lookup
from specjax.verify.target_first import TargetFirst
from specjax.verify.typical import Typical

RUN_FIELDS = {
    "workload", "method", "batch_size", "temperature", "prompts", "prompt_tokens", "new_tokens", "decode_seconds",
    "end_to_end_seconds", "tokens_per_second", "speedup", "speedup_interval", "tokens_per_cycle", "accepted_per_cycle",
    "acceptance_by_depth", "conditional_acceptance_by_depth", "time_to_first_token_ms", "inter_token_ms", "request_ms",
    "lossless", "identical", "ties", "eager_share_of_floor", "before_loop", "compile_seconds", "compiled_programs",
    "peak_memory_bytes", "draft_levels_per_cycle", "mean_block",
}  # fmt: skip
ROWS = [
    {"id": "a1", "task": "alpha", "prompt": "t3 t4 t5 t6 t3 t4"},
    {"id": "a2", "task": "alpha", "prompt": "t9 t4 t5 t6 t3 t4 t7 t8 t9 t10 t11"},
    {"id": "a3", "task": "alpha", "prompt": "t30"},
    {"id": "b1", "task": "beta", "turns": ["t9 t4 t5", "t8 t3"]},
    {"id": "b2", "task": "beta", "turns": ["t19 t14 t15"], "history": [{"role": "user", "content": "t7"}]},
]
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    eager = Engine(target(), "eager", chunk=scripted.CHUNK)
    return {"eager": eager, "lookup": eager.with_method("lookup")}


@pytest.fixture(scope="module")
def results(engines) -> dict:
    """Everything measured once: two batch sizes, two temperatures, and a method that is always wrong."""
    wrong = scripted.scripted(target(), scripted.trees.branches(63))
    prompts = [
        Prompt(row["id"], row["task"], tuple(row.get("turns", [row.get("prompt")])), tuple(row.get("history", ())))
        for row in ROWS
    ]
    plan = measure.Plan(batch_sizes=(1, 2), temperatures=(0.0, 1.0), max_new_tokens=20)
    *_, found = measure.run(engines | {"wrong": wrong}, prompts, plan)
    about = {"target_name": "tiny", "dtype": "float32", "device": "cpu", "cores": 2} | found["environment"]
    return {"schema_version": 1, "environment": about, "summary": found["summary"], "runs": found["runs"]}


# What is measured


def test_every_cell_has_a_whole_record_and_the_same_text(results):
    cells = list(itertools.product((1, 2), (0.0, 1.0), ("alpha", "beta"), ("eager", "lookup", "wrong")))
    runs = results["runs"]
    assert [(r["batch_size"], r["temperature"], r["workload"], r["method"]) for r in runs] == cells
    for run in runs:
        assert RUN_FIELDS <= run.keys()
        assert run["lossless"] == "tokens-equal" and run["identical"] == 1.0 and run["ties"] == []
        assert run["decode_seconds"] < run["end_to_end_seconds"]
        assert run["tokens_per_second"] == pytest.approx(run["decode_tokens"] / run["decode_seconds"])
        assert run["inter_token_ms"]["p50"] > 0
        assert run["peak_memory_bytes"] > sum(leaf.nbytes for leaf in target().leaves)
        assert 0 < run["eager_share_of_floor"] < 1 and run["compiled_programs"] == 2
    json.dumps(results, allow_nan=False)


def test_turns_are_decoded_one_by_one_only_without_batch_mates(results):
    requests = {(run["workload"], run["batch_size"]): run["requests"] for run in results["runs"]}
    assert requests == {("alpha", 1): 3, ("alpha", 2): 3, ("beta", 1): 3, ("beta", 2): 2}


def test_both_arms_count_the_same_tokens(results):
    for _, runs in itertools.groupby(results["runs"], lambda r: (r["batch_size"], r["temperature"], r["workload"])):
        eager, *others = runs
        for run in others:
            assert (run["new_tokens"], run["decode_tokens"]) == (eager["new_tokens"], eager["decode_tokens"])
            rate = run["decode_tokens"] / run["decode_seconds"] / (eager["decode_tokens"] / eager["decode_seconds"])
            assert run["speedup"] == pytest.approx(rate)


def test_eager_is_measured_against_itself(results):
    for run in results["runs"]:
        if run["method"] == "eager":
            assert run["tokens_per_cycle"] == run["mean_block"] == 1 and run["end_to_end_speedup"] == pytest.approx(1)
            assert run["speedup"] != 1  # the first decode over the last: the noise floor
    assert [row["batch_size"] for row in results["environment"]["noise_floor"]] == [1, 1, 2, 2]


def test_a_draft_that_is_always_wrong_is_reported_as_losing(results, capsys):
    losing = [run for run in results["runs"] if run["method"] == "wrong"]
    assert all(run["speedup"] < 1 for run in losing)
    only = {**results, **{k: [r for r in results[k] if r["method"] != "lookup"] for k in ("runs", "summary")}}
    assert report.sentence(only).startswith("Nothing pays for these prompts") and "0." in report.sentence(only)
    assert "slower" in report.markdown(only)
    report.show(only, Console(width=120))
    shown = capsys.readouterr().out
    assert "slower" in shown and "wrong: draft levels per cycle 0.0, mean block 64.0" in shown


def test_end_tokens_count_and_what_stands_after_them_does_not(engines):
    free = Sampling(max_new_tokens=20, ignore_end=True)
    eager = engines["eager"]
    texts = [r.tokens for r in eager.generate([[n, n + 1] for n in range(24)], free, batch_size=4)]
    rows = {}  # prompts whose end token, chosen for each, comes first as token 3, 8, 15, or never
    for stop in (3, 8, 15):
        rows[stop] = next(i for i, t in enumerate(texts) if t[stop - 1] not in t[: stop - 1] and i not in rows.values())
    rows[20] = next(i for i in range(24) if i not in rows.values())
    wishes = [free] * 4

    def ended(engine: Engine) -> tuple[int, list[list[int]]]:
        """One decode of the four rows, each with its own end token in the state."""
        state = engine.start([[i, i + 1] for i in rows.values()], wishes, 4)
        ends = np.array(state.text.ends)
        ends[:, 0] = [texts[i][stop - 1] if stop < 20 else -1 for stop, i in rows.items()]
        text = state.text.replace(ends=jax.device_put(ends, state.text.ends.sharding))
        (state, found), _ = timing.timed(
            engine, lambda: timing.copy(state.replace(text=text)), lambda s: engine.finish(engine.prefill(s), wishes)
        )
        zero = found[0].stats
        turn = timing.Turn([[1, 2]] * 4, wishes, 1.0, (1.0, 1.0), (found, found), zero, 0, None)
        return turn.new_tokens, [result.tokens for result in found]

    base, spec = ended(eager), ended(engines["lookup"])
    assert base == spec and base[0] == 3 + 8 + 15 + 20
    assert [len(tokens) for tokens in base[1]] == [3, 8, 15, 20]


def test_acceptance_is_pooled_over_cycles_and_every_figure_has_its_name():
    first = GenerationStats(3, 8, 12, 5, (3, 3, 3, 3), (2, 2, 1, 0), 5, (0, 3))  # keeps 3, 0, 2 of 4
    second = GenerationStats(1, 5, 4, 4, (1, 1, 1, 1), (1, 1, 1, 1), 1, (1, 0))
    both = timing.pooled([first, second])
    assert both.levels_per_cycle == 6 / 4 and both.mean_over_passes([1, 5]) == 16 / 4
    assert records.acceptance(both) == {
        "cycles": 4,
        "tokens_per_cycle": 3.25,
        "accepted_per_cycle": 2.25,
        "draft_acceptance_rate": 9 / 16,
        "acceptance_by_depth": [3 / 4, 3 / 4, 2 / 4, 1 / 4],
        "conditional_acceptance_by_depth": [3 / 4, 3 / 3, 2 / 3, 1 / 2],
    }


def test_the_predicted_speedup_prices_the_passes_and_levels_that_ran():
    stats = GenerationStats(4, 10, 9, 6, (3, 3, 3), (3, 2, 1), levels=6, passes=(1, 3))
    turn = SimpleNamespace(stats=stats, prompts=[[1, 2]], new_tokens=10)
    engine = SimpleNamespace(drafter=SimpleNamespace(blocks=(1, 4), depth=3), bucket=lambda tokens: 512)
    predicted = records.predicted_speedup(table(), "lookup", engine, [turn], 1)  # passes 40 and 60 ms, whole draft 2
    assert predicted == pytest.approx(2.5 * 40 / ((40 + 3 * 60) / 4 + 2 * 1.5 / 3))
    assert records.predicted_speedup(table(), "eagle", engine, [turn], 1) is None


# How it is timed


def test_the_clock_stops_after_the_arrays_are_there_and_never_runs_while_a_program_compiles(monkeypatch):
    eager = Engine(target(), "eager", chunk=scripted.CHUNK)
    engines = {"eager": eager, "lookup": eager.with_method("lookup")}
    events, ticks, ready = [], itertools.count(), jax.block_until_ready

    def clock() -> float:
        events.append(("clock", sum(len(engine.programs) for engine in engines.values())))
        return float(next(ticks))

    monkeypatch.setattr(timing, "clock", clock)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (ready(x), events.append(("ready", None)))[0])
    prompts = [Prompt(f"p{n}", "chat", (" ".join(["t7"] * n),)) for n in (3, 10, 30, 70, 150)]
    done = [timing.measure_batch(engines, [p], [Sampling(max_new_tokens=8)], 1, turns=1) for p in prompts]
    # Per timing: arrays ready, clock, work, arrays ready, clock; one that met a compilation is not kept.
    assert [kind for kind, _ in events] == ["ready", "clock", "ready", "clock"] * (len(events) // 4)
    assert all(turn.prefill_seconds == 1.0 for turns in done for (turn,) in turns.values())
    assert all(turn.decode_seconds == (1.0, 1.0) for turns in done for (turn,) in turns.values())
    kept = sum(a[1] == b[1] for a, b in zip(*[iter([e for e in events if e[0] == "clock"])] * 2))
    assert kept == len(prompts) * 6  # a prefill and two decodes of two engines
    assert all(len(engine.programs) <= 2 * len(engine.buckets) for engine in engines.values())


def test_prompts_shrink_to_fit_the_time():
    prompts = {name: [Prompt(f"{name}{i}", name, ("hi",)) for i in range(10)] for name in ("a", "b")}
    lengths = {name: [100] * 10 for name in prompts}
    paces = {1: measure.Pace(prefill=0.01, decode=0.1)}
    plan = measure.Plan(max_new_tokens=40, minutes=1)
    for budget, number in ((35.0, 3), (1e9, 10), (-5.0, 1)):  # a prompt of both takes 2 x (1 + 4) s x OVERHEAD
        chosen = measure._that_fit(prompts, lengths, paces, plan, budget)
        assert [len(group) for group in chosen.values()] == [number] * 2


def test_an_interval_covers_the_ratio_of_sums_and_needs_two_batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 100, 12)
    samples = np.stack([tokens, rng.uniform(1, 2, 12), tokens, rng.uniform(2, 3, 12)], axis=1)
    low, high = records.interval([samples])
    assert low < records.ratio(samples) < high
    assert records.interval([samples]) == records.interval([samples])
    assert records.interval([samples[:1]]) is None
    low, high = records.interval([row[None] for row in samples])  # one batch each: the workloads are drawn
    assert low < records.geometric_mean([row[None] for row in samples]) < high
    assert records.geometric_mean([np.array([[2.0, 1, 1, 1]]), np.array([[1.0, 2, 1, 1]])]) == pytest.approx(1)


# Texts that loop


@pytest.mark.parametrize(
    "tokens, spot",
    [
        ([1, 2, 3, 4], None),
        ([1, 2, 7, 7, 7], 2),
        ([1, 2, 7, 7], None),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4], 1),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2], None),
        ([0] + list(range(32)) * 3, 1),
        (list(range(33)) * 3, None),
        ([], None),
    ],
)
def test_onset_of_repetition(tokens, spot):
    assert loops.onset(tokens) == spot


def test_figures_before_the_loop_are_those_of_a_decode_that_stops_there(engines):
    texts = {i: engines["lookup"].generate([[i]], Sampling(max_new_tokens=60, ignore_end=True))[0] for i in range(20)}
    found = [(i, spot) for i, r in texts.items() if (spot := loops.onset(r.tokens)) is not None and spot > 3]
    if not found:
        pytest.skip("no text of the tiny target loops")
    prompt, spot = found[0]
    wish = Sampling(max_new_tokens=60, ignore_end=True)
    engine = engines["lookup"]
    ready = engine.prefill(engine.start([[prompt]], [wish], 1))
    stats, looping = timing._before_loop(engine, ready, [wish], [texts[prompt]])
    (cut,) = engine.generate([[prompt]], Sampling(max_new_tokens=spot, ignore_end=True))
    assert looping == 1 and stats == cut.stats and stats.emitted == spot - 1


# When a text is lossless


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_what_the_text_was_drawn_from(engines, temperature):
    wish = Sampling(max_new_tokens=12, temperature=temperature, seed=4, ignore_end=True)
    for prompt in (PROMPT, [8]):
        text = engines["lookup"].generate([prompt], wish)[0].tokens
        scores = list(Scorer(engines["eager"], 1).scores(prompt, text, wish))
        assert [int(row.argmax()) for row in scores] == text
        whole = scripted.logits(FIELDS, tensors(FIELDS), prompt + text)[len(prompt) - 1 : -1]
        if not temperature:
            np.testing.assert_allclose(np.stack(scores), whole, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spot", [0, 5, 11])
def test_a_wrong_token_is_no_tie(engines, temperature, spot):
    wish = Sampling(max_new_tokens=12, temperature=temperature, ignore_end=True)
    text = engines["eager"].generate([PROMPT], wish)[0].tokens
    wrong = [*text[:spot], (text[spot] + 1) % 97, *text[spot + 1 :]]
    found = Comparison()
    scorer = Scorer(engines["eager"], 1)
    scorer.compare(found, "p", PROMPT, text, wrong, wish, FLOAT32_BOUND)
    assert found.lossless == "no" and f"token {spot} " in found.failures[0] and not found.ties
    scorer.compare(found, "p", PROMPT, text, text[:-1], wish, FLOAT32_BOUND)
    assert found.compared == 2 and found.identical == 0 and "11 tokens" in found.failures[1]


def test_equal_logits_are_a_tie_and_what_follows_is_still_checked(tmp_path):
    table = tensors(FIELDS)
    eager = Engine(target(), "eager", chunk=scripted.CHUNK)
    wish = Sampling(max_new_tokens=12, ignore_end=True)
    text = eager.generate([PROMPT], wish)[0].tokens
    best, twin = text[4], next(i for i in range(96, 0, -1) if i not in text and i > text[4])
    table["lm_head.weight"][twin] = table["lm_head.weight"][best]  # their logits are now equal everywhere
    tied = Engine(load_target(save_target(tmp_path, table=table)), "eager", chunk=scripted.CHUNK)
    text = tied.generate([PROMPT], wish)[0].tokens
    spot = text.index(best)
    rest = tied.generate([[*PROMPT, *text[:spot], twin]], Sampling(max_new_tokens=11 - spot, ignore_end=True))[0].tokens
    other, scorer = [*text[:spot], twin, *rest], Scorer(tied, 1)
    found = Comparison()
    scorer.compare(found, "p", PROMPT, text, other, wish, FLOAT32_BOUND)
    assert found.lossless == "tokens-equal" and found.identical == 0
    assert [(t.prompt, t.position, t.expected, t.got) for t in found.ties] == [("p", spot, best, twin)]
    assert found.ties[0].gap < 1e-5
    spoilt = [*other[:-1], (other[-1] + 3) % 97]
    scorer.compare(found, "p", PROMPT, text, spoilt, wish, FLOAT32_BOUND)
    assert found.lossless == "no"


def test_nothing_is_lossless_that_was_not_compared():
    assert Comparison().lossless == "not compared"


def test_width_noise_is_small(engines):
    rough = Engine(target(dtype="bfloat16"), "eager", chunk=scripted.CHUNK)
    text = engines["eager"].generate([PROMPT], Sampling(max_new_tokens=40, ignore_end=True))[0].tokens
    fine, coarse = (Scorer(engine, 1).width_noise([PROMPT + text], [8]) for engine in (engines["eager"], rough))
    assert fine < FLOAT32_BOUND and coarse < 0.5


# What is told


def test_a_text_that_differs_is_told_loudly_and_never_recommended(results):
    spoilt = json.loads(json.dumps(results))
    for run in spoilt["runs"]:
        if run["method"] == "lookup":
            run |= {"speedup": 3.0, "lossless": "no", "identical": 0.5, "differences": ["a1: token 3 is 5, not 6"]}
    told = report.markdown(spoilt)
    assert "NOT LOSSLESS: lookup on alpha" in told and "NO (50% identical)" in told
    assert "lookup left out: not lossless" in report.sentence(spoilt)


def test_a_verifier_of_another_law_is_reported_as_not_lossless_and_its_texts_are_not_compared(engines):
    typical = engines["eager"].with_method((Lookup(), Typical(Lookup().depth)))
    prompt = Prompt("a1", "alpha", (ROWS[0]["prompt"],))
    *_, found = measure.run({"eager": engines["eager"], "typical": typical}, [prompt], measure.Plan(max_new_tokens=8))
    run = found["runs"][-1]
    assert (run["method"], run["lossless"], run["identical"]) == ("typical", "no", None)
    about = {"target_name": "tiny", "dtype": "float32", "device": "cpu", "cores": 2}
    told = report.markdown({"environment": about, "summary": found["summary"], "runs": found["runs"]})
    assert "NOT LOSSLESS: typical on alpha" in told and "no text was compared" in told
    assert "No method can be recommended; typical left out: not lossless" in told


def test_a_law_that_is_kept_by_another_text_is_compared_at_temperature_0_alone(engines):
    class Resampling(TargetFirst):
        seed_for_seed = False

    method = engines["eager"].with_method((Lookup(), Resampling(Lookup().depth)))
    prompt, plan = Prompt("a1", "alpha", (ROWS[0]["prompt"],)), measure.Plan(temperatures=(0.0, 1.0), max_new_tokens=8)
    *_, found = measure.run({"eager": engines["eager"], "resampling": method}, [prompt], plan)
    runs = [run for run in found["runs"] if run["method"] == "resampling"]
    assert [(run["lossless"], run["identical"]) for run in runs] == [("tokens-equal", 1.0), ("law-tested", None)]
    about = {"target_name": "tiny", "dtype": "float32", "device": "cpu", "cores": 2}
    told = report.markdown({"environment": about, "summary": found["summary"], "runs": found["runs"]})
    assert "| law-tested |" in told and "NOT LOSSLESS" not in told and "not compared" not in told


def test_the_script_writes_everything_and_says_where(tmp_path):
    rows, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [
        sys.executable, "-m", "launch.bench", "--config=configs/bench.py", "--max_context=128",
        f"--target={save_target(tmp_path / 'target')}", f"--workloads={rows}", f"--out={out}", "--max_new_tokens=8",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"tensorboard --logdir {out}"
    found = json.loads((out / "results.json").read_text())
    assert {"schema_version", "environment", "runs"} <= found.keys()
    assert {"device", "platform", "cores", "dtype", "versions", "target", "target_name", "command", "config", "date",
            "prompt_set_hash", "noise_floor", "seed"} <= found["environment"].keys()  # fmt: skip
    assert {"report.md", "results.json"} < {path.name for path in out.iterdir()}
    assert len(list(out.glob("*.png"))) == 3 and list(out.glob("events.out.tfevents.*"))
