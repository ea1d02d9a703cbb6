"""When a text ends, and what is said about it: end tokens, limits, the context, stop strings, bad requests, seeds."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from scripted import (
    CHAIN,
    CHUNK,
    TREE,
    decode,
    oracle,
    outputs,
    plain,
    prompts,
    save_target,
    script,
    scripted,
    target,
    wishes,
)

import specjax
from specjax import Conversation, Engine, Sampling
from specjax.decode.state import CONTEXT, LENGTH, STOP
from specjax.decode.watch import Watch
from specjax.drafters.lookup import Lookup

PROMPT = np.random.default_rng(26).integers(0, 97, 9).tolist()  # its greedy text has 18 different tokens in 24
SHAPES = {"chain": CHAIN, "tree": TREE}


@functools.cache
def greedy(prompt: tuple[int, ...] = tuple(PROMPT), count: int = 24) -> list[int]:
    return plain(prompt, count)


@functools.cache
def engine(shape: str) -> Engine:
    return scripted(target(), SHAPES[shape]) if shape in SHAPES else Engine(target(), shape, chunk=CHUNK)


def run(shape: str, asked: list[list[int]], wanted: list[Sampling], ends: dict[int, int] | None = None, loop="whole"):
    """(new tokens, final state) with the oracle for a draft; `ends`: row -> its end token."""
    method, rows = engine(shape), len(asked)
    state = method.start(asked, wanted, rows)
    known = np.full(state.text.ends.shape, -1, np.int32)
    for row, token in (ends or {}).items():
        known[row] = token
    ending = jax.device_put(known, state.text.ends.sharding)
    state = method.prefill(state.replace(text=state.text.replace(ends=ending)))
    if shape in SHAPES:
        texts = [prompt + greedy(tuple(prompt)) for prompt in asked]
        state = script(state, *oracle(texts, state.text.count.shape[0]))
    state = decode(method, state, loop)
    return outputs(state, rows), state


def first_at(index: int) -> int:
    """A token of the greedy text whose first occurrence is at or behind `index`."""
    text = greedy()
    return next(i for i in range(index, len(text)) if text[i] not in text[:i])


@pytest.mark.parametrize("shape", ["chain", "tree", "eager"])
def test_an_end_token_ends_the_text_wherever_in_a_block_it_is_accepted(shape):
    """Offsets 0 to 5 of a block of five drafts and the bonus token: nothing comes after the end token."""
    text, tried = greedy(), set()
    for index in range(len(text)):
        if text[index] in text[:index]:
            continue
        tried.add((index - 1) % (len(CHAIN)))
        (output,), state = run(shape, [PROMPT], wishes(1, max_new_tokens=24), {0: text[index]})
        assert output == text[: index + 1]
        assert int(state.text.finish[0]) == STOP
        assert int(state.text.count[0]) == len(PROMPT) + index + 1
        assert not np.asarray(state.text.tokens)[0, int(state.text.count[0]) :].any()
        assert int(state.stats.emitted[0]) == index
        assert int(state.cache.length[0]) == int(state.text.count[0]) - 1
    assert tried == set(range(len(CHAIN)))


def test_an_end_token_in_the_first_place_needs_no_cycle():
    (output,), state = run("chain", [PROMPT], wishes(1), {0: greedy()[0]})
    assert output == greedy()[:1]
    assert int(state.text.finish[0]) == STOP
    assert int(state.stats.cycles[0]) == 0


@pytest.mark.parametrize("shape", ["chain", "tree", "eager", "lookup"])
def test_asking_for_n_tokens_gives_n(shape):
    for count in (0, 1, 2, 5, 6, 7):
        (output,), state = run(shape, [PROMPT], wishes(1, max_new_tokens=count))
        assert output == greedy()[:count]
        assert int(state.text.finish[0]) == LENGTH
        assert int(state.cache.length[0]) <= len(PROMPT) + max(count - 1, 0)


@pytest.mark.parametrize("loop", ["whole", "sliced"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_finished_row_stands_still_while_others_go_on(shape, loop):
    """Rows that end after 1, a few, more tokens and at the limit: none changes the others, no count goes on."""
    asked = [PROMPT, *prompts([5, 12, 20])]
    stops = {}
    for row, index in enumerate((0, 5, 12)):
        text = greedy(tuple(asked[row]))
        spot = next(i for i in range(index, len(text)) if text[i] not in text[:i])
        stops[row] = text[spot], spot + 1
    rows, state = run(shape, asked, wishes(4, max_new_tokens=24), {row: end for row, (end, _) in stops.items()}, loop)
    assert [len(output) for output in rows] == [stops[0][1], stops[1][1], stops[2][1], 24]
    cycles = np.asarray(state.stats.cycles)
    for row, prompt in enumerate(asked):
        end = {0: stops[row][0]} if row in stops else {}
        (alone,), single = run(shape, [prompt], wishes(1, max_new_tokens=24), end, loop)
        assert rows[row] == alone == greedy(tuple(prompt))[: len(alone)]
        assert not np.asarray(state.text.tokens)[row, int(state.text.count[row]) :].any()
        assert int(state.text.finish[row]) == int(single.text.finish[0])
        for kept, own in zip(jax.tree.leaves(state.stats), jax.tree.leaves(single.stats), strict=True):
            np.testing.assert_array_equal(np.asarray(kept)[row], np.asarray(own)[0])
    assert cycles[0] == 0 and cycles.max() == cycles[3]


@pytest.mark.parametrize("shape", ["chain", "tree", "eager"])
def test_the_context_ends_a_text_and_no_write_is_moved(shape, monkeypatch):
    """Context 48, prompt 41: seven tokens fit, with and without a draft, in the smallest cache there can be."""
    monkeypatch.setattr("specjax.decode.programs.LANES", 1)
    if shape in SHAPES:
        small = scripted(target(), SHAPES[shape], max_context=48)
    else:
        small = Engine(target(), max_context=48, chunk=CHUNK)
    prompt = prompts([41])[0]
    state = small.prefill(small.start([prompt], wishes(1, max_new_tokens=20), 1))
    if shape in SHAPES:
        state = script(state, *oracle([prompt + plain(prompt, 20)], 1))
    state = small.decode(state)
    assert outputs(state, 1) == [plain(prompt, 7)]
    assert int(state.text.finish[0]) == CONTEXT
    fresh = small.prefill(small.start([prompt], wishes(1, max_new_tokens=1), 1))
    for kept, new in zip(state.cache.k + state.cache.v, fresh.cache.k + fresh.cache.v, strict=True):
        np.testing.assert_allclose(np.asarray(kept)[:, :, :41], np.asarray(new)[:, :, :41], atol=1e-6)
    with pytest.raises(ValueError, match="prompt 0 has 48 tokens and the context 48, which leaves no room"):
        small.generate([prompts([48])[0]])


def test_the_context_that_sets_the_length_is_named():
    (result,) = engine("eager").generate(prompts([185]), Sampling(max_new_tokens=20))
    assert (result.finish_reason, result.context_full, len(result.tokens)) == ("length", True, 7)


def test_every_end_token_of_the_checkpoint_stops(tmp_path):
    """The config names one, the generation config two, the tokenizer the first again; any of the three ends a text."""
    text = greedy()
    ends = [text[i] for i in (first_at(2), first_at(6), first_at(10))]
    folder = save_target(tmp_path, {"eos_token_id": ends[0]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[1:]}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    word = specjax.load_target(folder).tokenizer.tokens()[ends[0]]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": word}))
    opened = specjax.load(str(folder))
    assert set(opened.target.tokenizer.end_ids) == set(ends)
    results = [opened.generate([PROMPT], Sampling(max_new_tokens=24, ignore_end=skip))[0] for skip in (False, True)]
    assert (results[0].tokens, results[0].finish_reason) == (text[: first_at(2) + 1], "stop")
    assert (results[1].tokens, results[1].finish_reason) == (text, "length")
    for end in ends[1:]:
        start = text.index(end)
        (result,) = opened.generate([PROMPT + text[:start]], Sampling(max_new_tokens=9))
        assert result.tokens == [end]


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_a_stop_string_ends_and_clips_the_text(method):
    words = target().tokenizer
    text = greedy()
    spot = first_at(6)
    stop = words.decode(text[spot - 1 : spot + 1])
    pieces = []
    (result,) = engine(method).generate([PROMPT], Sampling(max_new_tokens=24, stop=("nowhere", stop)))
    (shown,) = engine(method).generate(
        [PROMPT], Sampling(max_new_tokens=24, stop=(stop,)), stream=lambda row, piece: pieces.append((row, piece))
    )
    whole = words.decode(text)
    assert result.finish_reason == shown.finish_reason == "stop"
    assert result.text == shown.text == whole[: whole.index(stop)]
    assert result.tokens == shown.tokens
    assert stop in words.decode(result.tokens) and stop not in words.decode(result.tokens[:-1])
    assert {row for row, _ in pieces} == {0}
    assert "".join(piece for _, piece in pieces) == result.text


def test_what_may_begin_a_stop_string_is_held_back_behind_an_incomplete_character_too():
    """Byte by byte: "ab" then a three-byte character; the stop string begins before its bytes are complete."""
    data = "xy-\u6237z".encode()

    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    pieces = []
    watch = Watch(Bytes(), [("-\u6237",)], lambda row, piece: pieces.append(piece))
    ended = [watch.see(0, list(data[:n]), done=False) for n in range(1, len(data) + 1)]
    assert "".join(pieces) == "xy" and ended.index(True) == len("xy-\u6237".encode()) - 1
    assert watch.clip(0, list(data)) == (list(data[:-1]), "xy")


def test_a_conversation_goes_on_after_an_interrupted_turn():
    talk, untouched = Conversation(engine("lookup")), Conversation(engine("lookup"))
    wish = Sampling(max_new_tokens=12)
    for each in (talk, untouched):
        each.say("t2 t40 t9", wish)

    def interrupt(row, piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.say("t3", wish, stream=interrupt)
    assert talk.say("t4", wish).tokens == untouched.say("t4", wish).tokens


def test_streamed_pieces_add_up_to_the_text_of_each_row():
    pieces = {}
    asked = prompts([5, 9, 12])

    def show(row, piece):
        pieces.setdefault(row, []).append(piece)

    results = engine("lookup").generate(asked, Sampling(max_new_tokens=40), batch_size=2, stream=show)
    assert all(len(parts) > 1 for parts in pieces.values())
    assert ["".join(pieces[row]) for row in range(3)] == [result.text for result in results]
    assert [result.tokens for result in results] == [plain(prompt, 40) for prompt in asked]


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.5),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", "word"),
        ("stop", ("",)),
    ],
)
def test_impossible_sampling_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*; it must be [^\n]*$"):
        Sampling(**{field: value})


def test_an_unknown_sampling_option_is_refused():
    with pytest.raises(TypeError, match="repetition_penalty"):
        Sampling(repetition_penalty=1.1)


@pytest.mark.parametrize(
    "bad, reason",
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ([], "is empty"),
        ([3, -1], "token id -1"),
        ([97], "token id 97"),
        ([1] * 192, "192 tokens"),
    ],
)
def test_a_bad_prompt_is_named_and_the_next_call_works(bad, reason):
    with pytest.raises(ValueError, match=f"^prompt 1 .*{reason}[^\n]*$"):
        engine("eager").generate([PROMPT, bad], Sampling(max_new_tokens=2))
    assert engine("eager").generate([[5]], Sampling(max_new_tokens=10**9, ignore_end=True))[0].tokens == plain([5], 191)


def test_no_prompts_make_no_results():
    assert engine("eager").generate([]) == []


def test_a_wrong_batch_size_or_number_of_samplings_is_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        engine("eager").generate([PROMPT], batch_size=0)
    with pytest.raises(ValueError, match="2 samplings were given for 1 prompts"):
        engine("eager").generate([PROMPT], [Sampling(), Sampling()])


def test_seeds_fix_the_text_and_rows_do_not_depend_on_their_batch():
    method = engine("lookup")
    sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=5)
    same = [PROMPT] * 4
    first, again = (method.generate(same, sampling, batch_size=4) for _ in range(2))
    assert [r.tokens for r in first] == [r.tokens for r in again]
    assert len({tuple(r.tokens) for r in first}) == 4
    other = method.generate(same, dataclasses.replace(sampling, seed=50), batch_size=4)
    assert {tuple(r.tokens) for r in other}.isdisjoint(tuple(r.tokens) for r in first)
    mates = [*prompts([5, 12]), PROMPT, [4]]
    wanted = [dataclasses.replace(sampling, seed=seed) for seed in (90, 91, 7, 92)]
    assert method.generate(mates, wanted, batch_size=4)[2].tokens == first[2].tokens
    alone = method.generate([PROMPT], dataclasses.replace(sampling, seed=7))
    assert alone[0].tokens == first[2].tokens


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_a_later_turn_of_a_conversation_equals_a_fresh_prefill(method):
    talk = Conversation(engine(method))
    for turn, temperature in enumerate((0.0, 1.0, 0.0)):
        sampling = Sampling(max_new_tokens=12, temperature=temperature, seed=turn)
        result = talk.say(f"t{turn + 2} t{turn + 40} t9", sampling)
        (fresh,) = engine(method).generate([talk.messages[:-1]], sampling)
        assert (result.tokens, result.text, result.prompt_tokens) == (fresh.tokens, fresh.text, fresh.prompt_tokens)
        assert result.stats == fresh.stats
    with pytest.raises(ValueError, match="the message is empty"):
        talk.say("  ")
    with pytest.raises(ValueError, match="the conversation has .* tokens and the context 192"):
        talk.say("t5 " * 200)
    assert len(talk.messages) == 6


def test_lookup_drafts_in_these_texts():
    """Otherwise the tests above would say little about it."""
    (result,) = engine("lookup").generate([prompts([60])[0]], Sampling(max_new_tokens=64, ignore_end=True))
    assert result.stats.drafted > 0 and isinstance(engine("lookup").drafter, Lookup)
