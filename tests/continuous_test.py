"""Continuous batching: every row writes what it writes alone, whoever sat in its place before and beside it."""

import functools

import numpy as np
import pytest
from scripted import CHAIN, CHUNK, oracle, prompts, script, scripted, target

from specjax import Engine, Sampling
from specjax.decode import continuous
from specjax.decode.request import Result

ENDS = (5, 17, 33, 48, 62, 80)
LENGTHS = (7, 60, 1, 33, 16, 100, 5, 17, 2, 48, 9)
NEW = (12, 5, 40, 1, 24, 30, 0, 40, 33, 7, 18)


@functools.cache
def engine(method: str = "eager", mesh: str = "") -> Engine:
    opened = target(mesh, eos_token_id=ENDS)
    return scripted(opened, CHAIN) if method == "scripted" else Engine(opened, method, chunk=CHUNK)


def asked(temperature: float) -> tuple[list[list[int]], list[Sampling]]:
    """Eleven requests of unlike lengths and limits; most find an end token on the way."""
    wishes = [Sampling(max_new_tokens=new, temperature=temperature, seed=50 + i) for i, new in enumerate(NEW)]
    return prompts(LENGTHS), wishes


@functools.cache
def alone(temperature: float) -> list[Result]:
    """What each request gets in a batch of its own, on one device."""
    return engine().generate(*asked(temperature))


def together(engine: Engine, requests, batch_size: int) -> list[Result]:
    found = list(continuous.generate(engine, *requests, batch_size=batch_size))
    assert sorted(index for index, _ in found) == list(range(len(requests[0])))
    return [result for _, result in sorted(found, key=lambda pair: pair[0])]


def test_the_requests_end_in_every_way_and_at_different_steps():
    """Otherwise the tests below would say little."""
    results = alone(1.0)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    assert len({len(result.tokens) for result in results}) > 6
    assert len(results[6].tokens) == 0 and len(results[3].tokens) == 1


@pytest.mark.parametrize("batch_size", [3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_equal_the_same_requests_alone(temperature, batch_size):
    """In 3 rows one prompt is let in at a time, in 8 rows two; eleven prompts leave one without a mate."""
    assert together(engine(), asked(temperature), batch_size) == alone(temperature)


def test_lookup_writes_the_same_and_copies_on_the_way():
    results = together(engine("lookup"), asked(0.0), 3)
    assert [result.tokens for result in results] == [result.tokens for result in alone(0.0)]
    assert sum(result.stats.accepted for result in results) > 0


def test_the_drafters_state_moves_into_its_row(monkeypatch):
    """Each fresh row brings the script of its own text: were any in the wrong row, drafts would be rejected."""
    method, requests = engine("scripted"), asked(1.0)
    whole = {tuple(ids): ids + result.tokens for ids, result in zip(requests[0], alone(1.0))}
    prefill = method.prefill

    def told(state):
        state = prefill(state)
        tokens, lengths = np.asarray(state.text.tokens), np.asarray(state.text.prompt)
        texts = [whole.get(tuple(row[:length].tolist()), []) for row, length in zip(tokens, lengths)]
        return script(state, *oracle(texts, len(texts)))

    monkeypatch.setattr(method, "prefill", told)
    for result, eager in zip(together(method, requests, 8), alone(1.0), strict=True):
        assert result.tokens == eager.tokens
        assert result.stats.cycles == -(-max(len(eager.tokens) - 1, 0) // len(CHAIN))


@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=4"])
def test_eight_devices_write_what_one_writes(mesh):
    assert together(engine("eager", mesh), asked(1.0), 8) == alone(1.0)


def test_a_request_as_long_as_its_bucket_stays_in_it(monkeypatch):
    """Buckets of 64 and 208 slots, context 192: the last that fits into 64, the first that does not, the longest."""
    monkeypatch.setattr("specjax.decode.programs.FIRST_BUCKET", 64)
    monkeypatch.setattr("specjax.decode.programs.LANES", 1)
    small = Engine(engine().target, chunk=CHUNK)
    assert small.buckets == [64, 208]
    assert [continuous.slots_needed(small, *sizes) for sizes in ((43, 20), (44, 20), (191, 10**6))] == [64, 208, 208]
    requests = prompts([43, 5, 48, 63]), [Sampling(max_new_tokens=new, ignore_end=True) for new in (20, 58, 15, 0)]
    assert together(small, requests, 3) == engine().generate(*requests)
    assert {slots for _, _, slots in small.programs._compiled} == {64}


def test_no_prompts_make_no_results():
    assert list(continuous.generate(engine(), [], [], batch_size=3)) == []


def test_stop_strings_are_refused():
    with pytest.raises(ValueError, match="stop strings are looked for by Engine.generate only"):
        next(continuous.generate(engine(), [[5]], [Sampling(stop=("x",))], batch_size=1))
