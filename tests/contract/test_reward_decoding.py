"""Reward processes decode token ids as the chat does."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config.rewards import GroupRewardConfig, RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow, Thinking
from asyncrl.rewards.reward_pool import RewardPool
from tests.environments import chat_with, opened

pytestmark = pytest.mark.timeout(180)

ROW = PromptRow((ChatMessage("user", "What is 3 + 4?"),), "7", "arithmetic", (), "data/sums.jsonl:12")


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Not started. Its rewards are found by the `sys.path` of this process, in a module that imports little."""
    (tmp_path / "rewards_that_compare.py").write_text(
        "def same(response, row):\n    return float(response == row.ground_truth)\n\n"
        "def all_same(responses, row):\n    return [same(response, row) for response in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    group = GroupRewardConfig(function="rewards_that_compare:all_same")
    return RewardPool(RewardConfig(function="rewards_that_compare:same", workers=2, group=group))


async def test_token_ids_are_decoded_as_the_chat_decodes_them(pool):
    """Also special tokens, bytes that are no character yet, and texts beside ids."""
    chat = chat_with()
    assert not pool.decodes
    pool.decode_with(chat.plain_decoder, chat.ends, Thinking())
    assert pool.decodes
    whole = chat.encode("<|im_start|>Straße: 3 + 4 = 7 <|im_end|> 日本語 ..., isn't it?")
    async with opened(pool):
        for ids in (whole, np.append(whole, chat.encode("<|im_end|>")), whole[:-3], whole[1:12], whole[:0]):
            row = replace(ROW, ground_truth=chat.decode(ids))
            for response in (ids, ids.astype(np.int64), chat.decode(ids)):
                assert (await pool.score(response, row)).reward == 1.0
            assert (await pool.score(whole[2:], row)).reward == 0.0
            assert [r.reward for r in await pool.score_group([ids, "else", chat.decode(ids)], row)] == [1.0, 0.0, 1.0]


async def test_token_ids_without_a_decoder_are_an_error(pool):
    async with opened(pool):
        with pytest.raises(TypeError, match="no decoder"):
            await pool.score(np.arange(3), ROW)
        assert (await pool.score("7", ROW)).reward == 1.0
