"""The user's object: prompts in, results out, for one target and one method.

prompts -> ids -> start -> prefill (chunks, growing buckets) -> decode (compiled loop, growing buckets) -> results
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache, methods
from specjax.costs import CostTable
from specjax.decode import state as states
from specjax.decode.loop import UNBOUNDED
from specjax.decode.programs import Programs, bucket_ladder, keep_compiled_programs
from specjax.decode.request import MAX_SEED, GenerationStats, Result, Sampling, sampling_rows
from specjax.decode.state import DecodeState, Text
from specjax.decode.target import Target
from specjax.decode.watch import Watch
from specjax.drafters.base import Drafter
from specjax.sampling import SamplingState
from specjax.sharding import row_spec

Prompt = str | Sequence[dict] | Sequence[int]
SLICE = 16


class Engine:
    """Decodes prompts with one method.

    `method` is a name of `methods`, or a (drafter, verifier) pair; `draft` the folder of its trained draft.
    `max_context`: most tokens a text may have, prompt included (default: the target's own limit). `chunk`:
    prompt tokens that one prefill pass takes. `template_args`: variables for the chat template. `costs`: what passes
    cost here; a method that can choose how much to draft goes by it.
    """

    def __init__(
        self,
        target: Target,
        method="eager",
        draft=None,
        *,
        max_context: int | None = None,
        chunk: int = 128,
        template_args: Mapping[str, Any] | None = None,
        costs: CostTable | None = None,
    ):
        limit = target.config.max_context
        if max_context is not None and not 0 < max_context <= limit:
            raise ValueError(
                f"max_context {max_context} is outside 1 to {limit}, the context that {target.name} was made for; "
                f"pass --max_context=N up to {limit}"
            )
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; a prefill pass takes 1 prompt token or more")
        keep_compiled_programs()
        self.target, self.max_context, self.chunk = target, max_context or limit, chunk
        self.template_args, self.costs = dict(template_args or {}), costs
        self.method = method if isinstance(method, str) else type(method[0]).__name__.lower()
        if isinstance(method, str):
            method = methods.build(method, target, draft, costs=costs, template_args=self.template_args)
        self.drafter, self.verifier = method
        self.buckets = bucket_ladder(self.max_context, max(chunk, self.drafter.depth + 1))
        self.programs = Programs(target, self.drafter, self.verifier, self.method, chunk, self.buckets)
        self._empty = jax.jit(self._fresh, static_argnums=(0, 1))  # kept: a new one for each request would compile anew
        self._grow = jax.jit(
            lambda kv, drafted, slots: (cache.grow(kv, slots), self.drafter.grow(drafted, slots)), static_argnums=2
        )
        self._insert = jax.jit(states.insert, donate_argnums=0)

    def with_method(self, method, draft=None) -> "Engine":
        """An engine for another method of the same target, sharing its parameters."""
        return Engine(
            self.target,
            method,
            draft,
            max_context=self.max_context,
            chunk=self.chunk,
            template_args=self.template_args,
            costs=self.costs,
        )

    def replace_drafter(self, drafter: Drafter) -> None:
        """Draft with other arrays from now on, without compiling anything again: for drafts still in training.

        Raises ValueError if the drafter differs in more than its arrays' values.
        """
        (new, structure), (old, own) = jax.tree.flatten(drafter), jax.tree.flatten(self.drafter)
        if structure != own:
            raise ValueError(
                f"the new drafter is not built like the engine's {type(self.drafter).__name__}; "
                "make an engine for it by with_method"
            )
        for theirs, ours in zip(new, old):
            if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
                raise ValueError(
                    f"the new drafter has {theirs.dtype}{list(theirs.shape)} where the engine's has "
                    f"{ours.dtype}{list(ours.shape)}; make an engine for it by with_method"
                )
        put = [jax.device_put(theirs, ours.sharding) for theirs, ours in zip(new, old)]
        self.drafter = self.programs.drafter = jax.tree.unflatten(own, put)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        *,
        batch_size: int = 1,
        stream: Callable[[int, str], None] | None = None,
    ) -> list[Result]:
        """Continue prompts: strings (as a user's message where the target has a chat template), message lists
        or token id lists.

        One `sampling` for all gives prompt i the seed `seed + i`. `stream(i, piece)` is called with text as it
        comes. Raises ValueError naming the prompt if one is empty or does not fit the context.
        """
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, dict))):
            prompts = [prompts]
        if isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        ids = [self.encode(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        wishes = spread(sampling, len(ids))
        results = []
        for first in range(0, len(ids), batch_size):
            part = slice(first, first + batch_size)
            piece = None if stream is None else lambda row, text, first=first: stream(first + row, text)
            state = self.prefill(self.start(ids[part], wishes[part], batch_size))
            results += self.finish(state, wishes[part], piece)[1]
        return results

    def encode(self, prompt: Prompt, name: str = "the prompt") -> list[int]:
        """A prompt as token ids, checked; ValueError says what is wrong with `name`."""
        words = self.target.tokenizer
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"{name} is empty; give it some text")
            chat = words.has_chat_template
            message = {"role": "user", "content": prompt}
            ids = words.encode_chat([message], self.template_args) if chat else words.encode(prompt)
        elif len(prompt) and isinstance(prompt[0], dict):
            if not prompt[-1].get("content", "").strip():
                raise ValueError(f"{name} ends with an empty message; give it some text")
            ids = words.encode_chat(prompt, self.template_args)
        else:
            ids = [int(i) for i in prompt]
        vocab = self.target.config.vocab_size
        if not ids:
            raise ValueError(f"{name} is empty; give it at least one token")
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise ValueError(f"{name} holds token id {bad[0]}, which is outside the vocabulary of {vocab}")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"{name} has {len(ids)} tokens and the context {self.max_context}, which leaves no room for an answer; "
                "shorten it or raise --max_context"
            )
        return ids

    def start(
        self, prompts: list[list[int]], wishes: Sequence[Sampling], batch_size: int, slots: int | None = None
    ) -> DecodeState:
        """A state whose rows are about to be prefilled; rows beyond the prompts are finished from the start.

        `slots`: the cache bucket to begin in (default: the smallest).
        """
        rows = -(-batch_size // self.target.mesh.shape["data"]) * self.target.mesh.shape["data"]
        with jax.set_mesh(self.target.mesh):
            fresh = self._empty(rows, slots)
        text, sampling = self._rows(prompts, wishes, rows)
        return DecodeState(text, fresh[0], fresh[1], sampling, fresh[2])

    def restart(self, state: DecodeState, prompt: list[int], wish: Sampling) -> DecodeState:
        """One-row state -> the state before prefilling `prompt`, keeping what the cache already holds of it.

        The last token that both texts have is taken in again: what a drafter made of it depends on the one after it.
        """
        held = np.asarray(state.text.tokens)[0][: np.asarray(state.cache.length)[0]]
        room = min(len(held), len(prompt) - 1)
        differs = np.flatnonzero(held[:room] != np.array(prompt[:room]))
        common = max(0, (int(differs[0]) if len(differs) else room) - 1)
        text, sampling = self._rows([prompt], [wish], state.text.tokens.shape[0])
        length = np.full(state.text.count.shape, common, np.int32)
        stats = self._put(jax.tree.map(lambda x: np.zeros(x.shape, np.int32), state.stats))
        drafted = self.drafter.cut(state.drafter, self._put(length))  # programs donate: each holds its own array
        kv = state.cache.replace(length=self._put(length))
        return state.replace(text=text, sampling=sampling, stats=stats, cache=kv, drafter=drafted)

    def prefill(self, state: DecodeState) -> DecodeState:
        """Take the prompts into the cache, chunk by chunk, and draw each row's first token."""
        prompt, length = np.asarray(state.text.prompt), np.asarray(state.cache.length)
        while (length < prompt).any():
            state = self._with_room(state, int(length.max()) + self.chunk)
            state = self.programs("prefill", state)
            length = np.minimum(length + self.chunk, np.maximum(prompt, length))
        return state

    def insert(self, state: DecodeState, fresh: DecodeState, rows: Sequence[int]) -> DecodeState:
        """Put the first rows of `fresh`, which has as many cache slots, into `state` at `rows`; `state` is donated."""
        spare = fresh.text.count.shape[0] - len(rows)
        with jax.set_mesh(self.target.mesh):
            return self._insert(state, fresh, np.array([*rows, *[-1] * spare], np.int32))

    def decode(self, state: DecodeState, cycles: int | None = None) -> DecodeState:
        """Cycle until all rows have finished, or for at most `cycles` cycles; moves to larger buckets as needed."""
        while np.asarray(state.text.running).any():
            state = self._with_room(state, _longest(state) + self.drafter.depth + 1)
            state = self.programs("loop", state, np.int32(UNBOUNDED if cycles is None else cycles))
            if cycles is not None:
                break
        return state

    def decode_on_host(self, state: DecodeState) -> DecodeState:
        """`decode` with one dispatch per cycle: for debugging and profiles."""
        number = 0
        while np.asarray(state.text.running).any():
            state = self._with_room(state, _longest(state) + self.drafter.depth + 1)
            with jax.profiler.StepTraceAnnotation("cycle", step_num=number):
                state = self.programs("step", state)
            number += 1
        return state

    def finish(self, state: DecodeState, wishes: Sequence[Sampling], stream=None) -> tuple[DecodeState, list[Result]]:
        """Decode prefilled rows to their ends; where somebody streams or gave stop strings, slice by slice."""
        watch = Watch(self.target.tokenizer, [wish.stop for wish in wishes], stream)
        if stream is None and not any(wish.stop for wish in wishes):
            state = self.decode(state)
        else:
            state = self._stopped(state, watch)
            while np.asarray(state.text.running)[: len(wishes)].any():
                state = self._stopped(self.decode(state, SLICE), watch)
        return state, [self.result(state, row, watch) for row in range(len(wishes))]

    def result(self, state: DecodeState, row: int, watch: Watch) -> Result:
        """What a row has written so far, clipped where `watch` found a stop string."""
        finish = np.asarray(state.text.finish)[row]
        stats = {name: np.asarray(count)[row].tolist() for name, count in vars(state.stats).items()}
        tokens, text = watch.clip(row, self._output(state, row))
        return Result(
            text=text,
            tokens=tokens,
            finish_reason="stop" if finish == states.STOP else "length",
            stats=GenerationStats(**{k: tuple(v) if isinstance(v, list) else v for k, v in stats.items()}),
            prompt_tokens=int(np.asarray(state.text.prompt)[row]),
            context_full=bool(finish == states.CONTEXT),
        )

    def bucket(self, slots: int) -> int:
        """The smallest cache size that has `slots` slots."""
        return next(size for size in self.buckets if size >= slots)

    def abstract(self, batch: int, slots: int) -> DecodeState:
        """Shapes and shardings of a state: what ahead-of-time compilation needs."""

        def make():
            kv, drafter, stats = self._fresh(batch, slots)
            zero, key = stats.cycles, _by_rows(jnp.zeros((batch, 2), jnp.uint32))
            tokens = _by_rows(jnp.zeros((batch, self._width), jnp.int32))
            text = Text(tokens, zero, zero, zero, zero, tokens[:, : self._ends], zero)
            real = zero.astype(jnp.float32)
            return DecodeState(text, kv, drafter, SamplingState(real, zero, real, key), stats)

        with jax.set_mesh(self.target.mesh):
            return jax.eval_shape(make)

    @property
    def _width(self) -> int:
        return self.buckets[-1] + 1

    @property
    def _ends(self) -> int:
        return max(1, len(self.target.tokenizer.end_ids)) if self.target.tokenizer else 1

    def _fresh(self, rows: int, slots: int | None = None):
        slots = slots or self.buckets[0]
        kv = cache.empty(self.target.config, rows, slots, self.target.dtype)
        return kv, self.drafter.init(rows, slots), jax.tree.map(_by_rows, states.no_stats(rows, self.drafter))

    def _rows(self, prompts, wishes, rows: int) -> tuple[Text, SamplingState]:
        """Host lists -> the rows' text and sampling arrays on the mesh."""
        spare = rows - len(prompts)
        prompts = [*prompts, *[[0]] * spare]
        wishes = [*wishes, *[Sampling(max_new_tokens=0)] * spare]
        length = np.array([len(p) for p in prompts], np.int32)
        asked = length + np.array([w.max_new_tokens for w in wishes], np.int64)
        limit = np.minimum(asked, self.max_context).astype(np.int32)
        reason = np.where(asked > self.max_context, states.CONTEXT, states.LENGTH).astype(np.int32)
        tokens = np.zeros((rows, self._width), np.int32)
        ends = np.full((rows, self._ends), -1, np.int32)
        for row, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
            tokens[row, : len(prompt)] = prompt
            known = self.target.tokenizer.end_ids if self.target.tokenizer and not wish.ignore_end else ()
            ends[row, : len(known)] = known
        finish = np.where(limit > length, states.RUNNING, states.LENGTH).astype(np.int32)
        text = Text(tokens, length, length.copy(), limit, reason, ends, finish)
        return self._put((text, sampling_rows(wishes)))

    def _put(self, tree):
        return jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(self.target.mesh, row_spec(x.ndim))), tree)

    def _with_room(self, state: DecodeState, slots: int) -> DecodeState:
        """The state in the smallest bucket that has `slots` slots and is no smaller than its own."""
        if slots <= state.cache.slots:
            return state
        bucket = self.bucket(slots)
        with jax.set_mesh(self.target.mesh):
            kv, drafter_state = self._grow(state.cache, state.drafter, bucket)
            return state.replace(cache=kv, drafter=drafter_state)

    def _stopped(self, state: DecodeState, watch: Watch) -> DecodeState:
        """Show the watch each row's new tokens and end the rows in which it found a stop string."""
        finish = np.array(state.text.finish)
        for row in range(watch.rows):
            if watch.see(row, self._output(state, row), done=finish[row] != states.RUNNING):
                finish[row] = states.STOP
        return state.replace(text=state.text.replace(finish=self._put(finish)))

    def _output(self, state: DecodeState, row: int) -> list[int]:
        start, end = np.asarray(state.text.prompt)[row], np.asarray(state.text.count)[row]
        return np.asarray(state.text.tokens)[row, start:end].tolist()


def _longest(state: DecodeState) -> int:
    return int(np.asarray(state.cache.length).max())


def _by_rows(x: jax.Array) -> jax.Array:
    return jax.reshard(x, row_spec(x.ndim))


def spread(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    """One Sampling per prompt; a single one is repeated with seeds seed, seed + 1, ..."""
    if isinstance(sampling, Sampling):
        return [dataclasses.replace(sampling, seed=(sampling.seed + i) % MAX_SEED) for i in range(count)]
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} samplings were given for {count} prompts; give one, or one for each")
    return list(sampling)
