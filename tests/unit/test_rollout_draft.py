import numpy as np
import pytest

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
