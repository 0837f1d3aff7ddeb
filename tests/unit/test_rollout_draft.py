import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.incremental_decoder import IncrementalDecoder
from asyncrl.data.stop_strings import StopStrings, StopTable, StopTexts
from asyncrl.rollout.draft import Draft
from asyncrl.types import Generation, SamplingParams, Segment, TokenChunk


def chunk(*ids, version=0, reason=None, cached=0):
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return TokenChunk("r", np.array(ids, np.int32), logprobs, version, reason, cached_tokens=cached)


PRIOR = Generation(
    np.array([1, 2], np.int32),
    np.array([10, 11, 12, 13], np.int32),
    np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
    (Segment(0, 1, 3, 0), Segment(1, 4, 4, 2)),
    "abort",
)


def test_a_prior_stands_first_with_its_own_versions_and_replicas():
    draft = Draft(PRIOR)
    draft.add(chunk(14, version=4), 2)
    draft.add(chunk(15, version=4), 0)
    draft.add(chunk(16, version=6), 0)
    made = draft.generation(PRIOR.prompt_ids, "length", 1)
    assert made.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert made.logprobs[:4].tolist() == PRIOR.logprobs.tolist()
    assert made.segments == (Segment(0, 1, 3, 0), Segment(1, 5, 4, 2), Segment(5, 6, 4, 0), Segment(6, 7, 6, 0))


def test_a_record_is_a_copy_that_can_be_continued():
    draft = Draft()
    draft.add(chunk(1, 2, version=1), 0)
    record = draft.generation(PRIOR.prompt_ids)
    draft.add(chunk(3, version=2), 1)
    assert (record.token_ids.tolist(), record.segments, record.finish_reason) == (
        [1, 2],
        (Segment(0, 2, 1, 0),),
        "abort",
    )
    again = Draft(record)
    again.add(chunk(3, version=2), 1)
    assert again.segments == draft.segments
    assert again.token_ids.tolist() == draft.token_ids.tolist()


def test_nothing_sampled_is_an_empty_record():
    record = Draft().generation(PRIOR.prompt_ids)
    assert (len(record.token_ids), len(record.logprobs), record.segments) == (0, 0, ())
    assert (record.token_ids.dtype, record.logprobs.dtype) == (np.int32, np.float32)


def test_the_end_of_a_response_is_seen_from_its_tokens_when_the_replica_did_not_say():
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(13,))
    draft = Draft()
    draft.add(chunk(10, 11), 0)
    assert draft.complete(sampling, None) is None
    assert draft.complete(sampling, "abort") is None
    assert draft.complete(sampling, "stop") == "stop"
    assert Draft(PRIOR).complete(sampling, None) == "stop", "also of a prior"
    assert Draft(PRIOR).complete(SamplingParams(max_tokens=4), "abort") == "length"


def test_cached_tokens_are_those_of_the_first_attempt_that_ended():
    draft = Draft(PRIOR)
    draft.add(chunk(1, cached=99), 0)
    draft.add(chunk(reason="abort", cached=16), 0)
    draft.add(chunk(2, reason="length", cached=32), 1)
    assert draft.generation(PRIOR.prompt_ids, "length", 1).cached_tokens == 16


def test_a_token_without_its_log_probability_is_an_error_and_not_added():
    draft = Draft(PRIOR)
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probabilities"):
        draft.add(chunk(14, 15)._replace(logprobs=np.zeros(1, np.float32)), 2)
    assert draft.generation(PRIOR.prompt_ids).logprobs.tolist() == PRIOR.logprobs.tolist()


# -- incremental text: whatever the pieces, their sum is the whole text ------------------------------------------------


def decode(ids):
    """A byte-level tokenizer: a token is a byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def cut(items, places):
    edges = [0, *sorted(p % (len(items) + 1) for p in places), len(items)]
    return [items[a:b] for a, b in pairwise(edges) if b > a]


TEXT = st.text(st.sampled_from("ab é€😀\n\ufffd"), max_size=150)
PLACES = st.lists(st.integers(0, 600), max_size=40)


@given(TEXT.map(str.encode) | st.binary(max_size=200), PLACES)
def test_pieces_join_to_what_the_whole_decodes_to_and_never_break_a_character(data, places):
    decoder, text = IncrementalDecoder(decode), decode(data)
    pieces = [decoder.feed(ids) for ids in cut(list(data), places)]
    assert "".join([*pieces, decoder.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("a😀ไé", max_size=60), PLACES)
def test_a_run_of_bytes_is_text_once_its_last_character_is_whole(text, places):
    """As SentencePiece's decoders do it: each byte of a run with an incomplete character shows as one."""

    def by_runs(ids):
        runs = re.findall(rb"[\x80-\xff]+|[^\x80-\xff]+", bytes(ids))
        try_run = lambda run: "\ufffd" * len(run) if "\ufffd" in decode(run) else decode(run)  # noqa: E731
        return "".join(map(try_run, runs))

    decoder = IncrementalDecoder(by_runs)
    pieces = [decoder.feed(ids) for ids in cut(list(text.encode()), places)]
    assert "".join([*pieces, decoder.finish()]) == text


def test_text_is_not_held_longer_than_a_character_may_take():
    decoder = IncrementalDecoder(decode)
    assert decoder.feed("ab€".encode()[:-1]) == "ab"
    assert decoder.feed("€".encode()[-1:]) == "€"


@pytest.mark.parametrize("byte", [b"x", b"\x9f"], ids=["text", "no text"])
def test_only_a_window_is_decoded(byte):
    sizes = []
    decoder = IncrementalDecoder(lambda ids: sizes.append(len(ids)) or decode(ids))
    pieces = [decoder.feed(byte) for _ in range(3000)]
    assert "".join([*pieces, decoder.finish()]) == decode(byte) * 3000
    assert max(sizes) < (100 if byte == b"x" else 1100)


def test_a_tokenizer_that_drops_a_leading_space_sees_the_prompt():
    words = ["zero", "one", "two"]
    decoder = IncrementalDecoder(lambda ids: " ".join(words[i] for i in ids), [0, 1])
    assert decoder.feed([2]) + decoder.feed([1]) == " two one"


@given(
    st.text("ab", max_size=80),
    st.lists(st.text("ab", min_size=1, max_size=9), max_size=4),
    PLACES,
    st.integers(0, 4),
)
def test_the_first_stop_string_to_be_complete_ends_the_text_however_it_is_cut(text, strings, places, repeats):
    """Against every end of every beginning of the text, one by one."""
    text, strings = text * (1 + repeats), [*strings, *(s * repeats for s in strings if repeats)]
    expected, found = text, None
    for end in range(1, len(text) + 1):
        if complete := [s for s in strings if text[:end].endswith(s)]:
            found = max(complete, key=len)
            expected = text[: end - len(found)]
            break
    stops, sent = StopStrings(StopTable(strings)), ""
    for piece in cut(text, places):
        sent += stops.feed(piece)
        if stops.found is not None:
            break
        taken = text[: len(sent) + len(stops._held)]
        held = [s[:n] for s in strings for n in range(1, len(s)) if taken.endswith(s[:n])]
        assert len(stops._held) == max(map(len, held), default=0), "more or less is held than may become one"
    assert (sent + stops.finish(), stops.found) == (expected, found)


class Counted(list):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_a_character_costs_one_step_on_average_whatever_the_stop_strings_are():
    strings = ["a" * 255 + end for end in "bcdefghijklmnop"]
    table = StopTable(strings)
    table._shorter = Counted(table._shorter)
    stops = StopStrings(table)
    text = ("a" * 254 + "x") * 40
    sent = "".join(stops.feed(text[i : i + 4]) for i in range(0, len(text), 4)) + stops.finish()
    assert (sent, stops.found) == (text, None)
    assert table._shorter.reads <= len(text)


# -- stop texts in tokens ----------------------------------------------------------------------------------------

VOCABULARY = [bytes([b]) for b in range(256)] + [w.encode() for w in ("ab", "ba", "aab", "é", "€a", "b€", "</t", "ol>")]


def spell(ids):
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", errors="replace")


def whole_cut(ids, texts):
    """The number of tokens of the shortest beginning whose complete characters contain a stop text, by trying all."""
    for count in range(1, len(ids) + 1):
        certain = spell(ids[:count])
        stable = len(certain)
        while stable > len(certain) - 3 and certain[:stable].endswith("\ufffd"):
            stable -= 1
        if any(text in certain[:stable] for text in texts):
            return count
    return None


TOKENS = st.lists(st.sampled_from([*b"ab\x82\xac", *"€".encode(), *range(256, len(VOCABULARY))]), max_size=60)
STOP_TEXTS = st.lists(st.text("abé€</>", min_size=1, max_size=5), min_size=1, max_size=4)


@given(TOKENS, STOP_TEXTS, PLACES, TOKENS)
def test_a_response_ends_with_the_token_that_completes_a_stop_text_however_it_is_chunked(ids, texts, places, prompt):
    finder = StopTexts(texts, spell).follow(prompt[-8:])
    kept = 0
    for part in cut(ids, places):
        kept += finder.feed(part)
        if finder.found is not None:
            break
    expected = whole_cut(ids, texts)
    assert kept == (len(ids) if expected is None else expected)
    assert (finder.found is None) == (expected is None)
    if expected is not None:
        assert finder.found in texts
        assert finder.found in spell(ids[:kept])


@given(TOKENS, STOP_TEXTS, PLACES, st.lists(st.integers(0, 3), max_size=8), st.integers(0, 60))
def test_a_draft_keeps_tokens_logprobs_and_versions_up_to_there_over_chunks_publishes_and_resumes(
    ids, texts, places, versions, resumed_at
):
    """Chunks of changing versions and replicas, and a checkpoint after some of them that another process continues."""
    stop = StopTexts(texts, spell)
    draft, sources = Draft(finder=stop.follow([])), []
    for number, part in enumerate(cut(list(range(len(ids))), places)):
        if number == resumed_at % 5:
            draft = Draft(draft.generation(np.array([1], np.int32)), finder=stop.follow([]))
        source = (versions[number % len(versions)] if versions else 0, number % 2)
        sources += [source] * len(part)
        token_ids = np.array([ids[i] for i in part], np.int32)
        draft.add(TokenChunk("r", token_ids, -np.array(part, np.float32), source[0]), source[1])
    end = whole_cut(ids, texts)
    kept = len(ids) if end is None else end
    made = draft.generation(np.array([1], np.int32), "stop")
    assert made.token_ids.tolist() == ids[:kept]
    assert made.logprobs.tolist() == [-float(i) for i in range(kept)]
    stamped = [(s.version, s.replica_id) for s in made.segments for _ in range(s.start, s.stop)]
    assert stamped == sources[:kept]
    sampling = SamplingParams(max_tokens=len(ids) + 1)
    assert draft.complete(sampling, None) == (None if end is None else "stop")
    assert draft.complete(sampling, "length") == ("length" if end is None else "stop")


def test_a_stop_text_costs_one_decoding_per_chunk_and_one_per_token_of_the_last():
    calls = []
    finder = StopTexts(["END"], lambda ids: calls.append(len(ids)) or spell(ids)).follow([])
    text = b"a" * 1600 + b"xEND"
    kept = sum(finder.feed(text[i : i + 16]) for i in range(0, len(text), 16) if finder.found is None)
    assert (kept, finder.found) == (1604, "END")
    assert len(calls) < 2 * 101 + 4
    assert max(calls) < 100
