"""One batch of prompts under several engines, timed.

turn 1    prefill   E  M           each engine's prefilled state is kept, and every decode starts from a copy of it
          decode    E  M  M  E     so a machine that grows slower or faster meanwhile favours neither (ABBA)
turn 2    ...                      continues on the prefix; all engines are asked the same: the baseline's answers
                                   are the history
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.loops import onset
from specjax.bench.workloads import Prompt
from specjax.decode.engine import Engine
from specjax.decode.request import GenerationStats, Result, Sampling
from specjax.decode.state import DecodeState

clock = time.perf_counter


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one engine did with one turn of a batch.

    `prompts`: the rows' token ids; `wishes`: their samplings; `prefill_seconds`: until the first token;
    `decode_seconds`: of both decodes, from the first token until every row's tokens are on the host;
    `results`: the rows' results of both decodes; `before_loop`: the counts up to the onset of repetition of the
    rows that loop, and whole those of the others; `looping`: how many rows loop; `memory_bytes`: what the decode
    loop holds on one device, parameters, state and temporaries (None: the compiler does not say).
    """

    prompts: list[list[int]]
    wishes: list[Sampling]
    prefill_seconds: float
    decode_seconds: tuple[float, ...]
    results: tuple[list[Result], ...]
    before_loop: GenerationStats
    looping: int
    memory_bytes: int | None

    @property
    def mean_decode_seconds(self) -> float:
        return float(np.mean(self.decode_seconds))

    @property
    def stats(self) -> GenerationStats:
        """Counts pooled over the rows of one decode."""
        return pooled([result.stats for result in self.results[0]])

    @property
    def new_tokens(self) -> int:
        """Tokens up to and including the end token, of all rows of one decode."""
        return sum(len(result.tokens) for result in self.results[0])


def pooled(stats: Sequence[GenerationStats]) -> GenerationStats:
    """The sum of counts: figures from it are over cycles, not means over prompts."""
    return sum(stats[1:], start=stats[0])


def measure_batch(
    engines: Mapping[str, Engine], prompts: Sequence[Prompt], wishes: Sequence[Sampling], batch_size: int, turns: int
) -> dict[str, list[Turn]]:
    """Decode prompts together with every engine, the first being the baseline; engine's name -> its turns.

    More than one of `turns` needs a batch of one. Raises ValueError naming a prompt that does not fit the context.
    """
    baseline, wishes = next(iter(engines)), list(wishes)
    messages = [list(prompt.history) for prompt in prompts]
    states: dict[str, DecodeState | None] = dict.fromkeys(engines)
    done: dict[str, list[Turn]] = {name: [] for name in engines}
    for turn in range(turns):
        for row, prompt in zip(messages, prompts, strict=True):
            row.append({"role": "user", "content": prompt.turns[turn]})
        ids = [engines[baseline].encode(row, p.id) for row, p in zip(messages, prompts, strict=True)]
        states, answers = _measure_turn(engines, states, ids, wishes, batch_size)
        for name, answer in answers.items():
            done[name].append(answer)
        for row, result in zip(messages, answers[baseline].results[0], strict=True):
            row.append({"role": "assistant", "content": result.text})
    return done


def _measure_turn(engines, held, ids, wishes, batch_size) -> tuple[dict[str, DecodeState], dict[str, Turn]]:
    """Prefill, then decode in ABBA order; gives each engine's last state, for the next turn, and what it did."""

    def prefill(engine: Engine, state: DecodeState | None) -> DecodeState:
        begun = engine.start(ids, wishes, batch_size) if state is None else engine.restart(state, ids[0], wishes[0])
        return engine.prefill(begun)

    ready, first_token = {}, {}
    for name, engine in engines.items():
        ready[name], first_token[name] = timed(
            engine, lambda name=name: copy(held[name]), lambda state, engine=engine: prefill(engine, state)
        )
    states, seconds, results = {}, {name: () for name in engines}, {name: () for name in engines}
    for name in [*engines, *reversed(engines)]:
        engine = engines[name]
        (states[name], rows), taken = timed(
            engine, lambda name=name: copy(ready[name]), lambda state, engine=engine: engine.finish(state, wishes)
        )
        seconds[name] += (taken,)
        results[name] += (rows,)
    turns = {}
    for name, engine in engines.items():
        stats, looping = _before_loop(engine, ready.pop(name), wishes, results[name][0])
        memory = _loop_memory(engine, states[name])
        turns[name] = Turn(ids, wishes, first_token[name], seconds[name], results[name], stats, looping, memory)
    return states, turns


def timed(engine: Engine, prepare: Callable[[], Any], work: Callable[[Any], Any]) -> tuple[Any, float]:
    """work(prepare()) and the seconds that `work` took until all its arrays were there.

    If a program had to be compiled on the way it is all done again, so that no compilation is ever timed.
    """
    while True:
        before = jax.block_until_ready(prepare())
        programs = len(engine.programs)
        start = clock()
        after = jax.block_until_ready(work(before))
        seconds = clock() - start
        if len(engine.programs) == programs:
            return after, seconds


def copy(state: DecodeState | None) -> DecodeState | None:
    """The same state in arrays of its own: the programs donate what they are given."""
    return jax.tree.map(jnp.copy, state)


def _before_loop(engine: Engine, ready: DecodeState, wishes, results: list[Result]) -> tuple[GenerationStats, int]:
    """Counts of the cycles before a row's text begins to repeat, and how many rows do. `ready` is used up.

    The state keeps totals only, so where a text loops it is decoded once more, untimed, up to the onset:
    the same seed gives the same text.
    """
    onsets = [onset(result.tokens) for result in results]
    looping = sum(spot is not None for spot in onsets)
    if not looping:
        return pooled([result.stats for result in results]), 0
    limit, prompt = np.array(ready.text.limit), np.array(ready.text.prompt)
    for row, spot in enumerate(onsets):
        if spot is not None:
            limit[row] = prompt[row] + max(spot, 1)  # prefill has written one token already
    text = ready.text.replace(limit=jax.device_put(limit, ready.text.limit.sharding))
    _, cut = engine.finish(ready.replace(text=text), wishes)
    return pooled([result.stats for result in cut]), looping


def _loop_memory(engine: Engine, state: DecodeState) -> int | None:
    """Bytes that the decode loop of states like this one holds on one device."""
    held = engine.programs.compiled("loop", state).memory_analysis()
    if held is None:
        return None
    return held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes
