"""The judge: a model in a pool of its own that scores responses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.config.rewards import JudgeConfig
from asyncrl.data.chat import Chat
from asyncrl.data.rows import IMAGE, PromptRow
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError, GenerationError, explain
from asyncrl.remote.tasks import concurrently
from asyncrl.rewards.pairwise import scored
from asyncrl.rewards.reward import RewardResult
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import SamplingParams

_TOLD_CHARS = 200


class Judge:
    """Fills `reward.judge.prompt` with responses, and turns the judge's answers into rewards. Owns the judge's
    tokenizer, not the client."""

    def __init__(
        self, config: JudgeConfig, model: ModelConfig, client: GenerationClient, *, max_model_len: int
    ) -> None:
        """Raises ConfigError: the judge has no tokenizer or no chat template, or one answer is a prefix of another."""
        self._config = config
        self._max_model_len = max_model_len
        self._client = client
        tokenizer = load_tokenizer(model)
        self._chat = Chat(tokenizer, model)
        self._answers = [
            (np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32), worth)
            for text, worth in config.worths.items()
        ]
        if config.read == "expected":
            _require_distinct(dict(zip(config.worths, (ids for ids, _ in self._answers), strict=True)))

    async def score(self, response: str, row: PromptRow) -> RewardResult:
        """The reward of one response. Raises GenerationError: no answer in time; ValueError, with on_unreadable=fail:
        the question is too long, or the answer cannot be read."""
        return await self._ask({"{response}": response}, row)

    async def compare(self, responses: Sequence[str], row: PromptRow) -> tuple[RewardResult, ...]:
        """The reward of each response of a group, by comparisons of all pairs in both orders. Raises as `score`."""
        pairs = list(itertools.permutations(range(len(responses)), 2))
        found = await concurrently(
            self._ask({"{first}": responses[i], "{second}": responses[j]}, row) for i, j in pairs
        )
        shares, unreadable = np.full((len(responses), len(responses)), 0.5), np.zeros(len(responses))
        for (i, j), result in zip(pairs, found, strict=True):
            if result.parts:  # unreadable: a tie
                unreadable[i] += 1 / (len(responses) - 1)
            else:
                shares[i, j] = result.reward
        worth = scored(shares, self._config.scores).tolist()
        shown = [(("unreadable", share),) if share else () for share in unreadable.tolist()]
        return tuple(RewardResult(value, parts) for value, parts in zip(worth, shown, strict=True))

    async def _ask(self, places: Mapping[str, str], row: PromptRow) -> RewardResult:
        prompt = "\n".join(message.content for message in row.messages)
        filled = _filled(self._config.prompt, {**places, "{prompt}": prompt, "{truth}": row.ground_truth})
        filled = IMAGE.sub("[image]", filled)
        prompt_ids = self._chat.prompt([{"role": "user", "content": filled}])
        answers = [len(ids) for ids, _ in self._answers]
        length = len(prompt_ids) + (max(answers) if self._config.read == "expected" else self._config.max_tokens)
        if length > self._max_model_len:
            found = f"a question that takes {length} tokens with its answer, more than max_model_len"
            return self._unreadable(row, found, f"raise the judge's max_model_len={self._max_model_len}")
        try:
            if self._config.read == "expected":
                return RewardResult(await self._expected(prompt_ids))
            return await self._written(prompt_ids, row)
        except GenerationError as error:
            raise GenerationError(f"the judge on a response to {row.origin}: {error}") from error

    async def _expected(self, prompt_ids: np.ndarray) -> float:
        """The mean worth of the answers, weighted by their relative probabilities."""
        asked = (np.concatenate([prompt_ids, ids]) for ids, _ in self._answers)
        found = await concurrently(self._client.score(tokens, len(prompt_ids)) for tokens in asked)
        logprobs = np.array([float(np.sum(answer.logprobs, dtype=np.float64)) for answer in found])
        likely = np.exp(logprobs - logprobs.max())
        return float(likely @ [worth for _, worth in self._answers] / likely.sum())

    async def _written(self, prompt_ids: np.ndarray, row: PromptRow) -> RewardResult:
        """The reward for the judge's written answer."""
        config = self._config
        sampling = SamplingParams(
            temperature=0.0, max_tokens=config.max_tokens, stop_token_ids=tuple(sorted(self._chat.ends))
        )
        generation = await self._client.generate(prompt_ids, sampling)
        text = self._chat.decode_turn(generation.token_ids)
        worth = read_worth(text, config)
        if worth is not None:
            return RewardResult(worth)
        found = f"an answer that cannot be read: {text[-_TOLD_CHARS:]!r}"
        return self._unreadable(row, found, "correct reward.judge.prompt or pattern; raise max_tokens")

    def _unreadable(self, row: PromptRow, found: str, do: str) -> RewardResult:
        if self._config.on_unreadable == "zero":
            worst = min if self._config.weight > 0 else max
            return RewardResult(worst((0.0, *self._config.worths.values())), (("unreadable", 1.0),))
        raise ValueError(explain(f"the judge on a response to {row.origin}", found, do))


def read_worth(text: str, config: JudgeConfig) -> float | None:
    """The worth in a judge's text, by the last match of `config.pattern`. None: no match, or the match is neither a
    known answer nor, if no answers are configured, a finite number (with pairwise from 0 to 1)."""
    matches = re.findall(config.pattern, text)
    if not matches:
        return None
    if config.worths:
        return config.worths.get(matches[-1])
    try:
        worth = float(matches[-1])
    except ValueError:
        return None
    in_range = 0 <= worth <= 1 if config.pairwise else np.isfinite(worth)
    return worth if in_range else None


def _require_distinct(answers: Mapping[str, np.ndarray]) -> None:
    """Raises ConfigError: the tokens of one answer are a prefix of another's, so its probability would include the
    other."""
    for (one, first), (other, second) in itertools.combinations(answers.items(), 2):
        shared = min(len(first), len(second))
        if np.array_equal(first[:shared], second[:shared]):
            found = "to the judge's tokenizer one begins with the other: its probability includes the other's"
            do = "choose answers that begin differently, such as yes and no"
            raise ConfigError(explain(f"reward.judge.answers {one!r} and {other!r}", found, do))


def _filled(template: str, places: Mapping[str, str]) -> str:
    """The template, filled in one pass: a response that contains the name of a place is not filled again."""
    return re.sub("|".join(map(re.escape, places)), lambda found: places[found.group()], template)
