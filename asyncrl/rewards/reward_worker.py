"""A reward process: `python -m asyncrl.rewards.reward_worker NAME...`; the names are for people. It answers a
`RewardRequest` with a `RewardResult` and a `GroupRequest` with one for each response, of plain numbers."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.rewards import build_reward
from asyncrl.rewards.group import build_group_reward
from asyncrl.rewards.reward import GroupRequest, Response, RewardRequest, RewardResult, RewardSettings
from asyncrl.workers.worker_loop import serve


def _scorer(
    settings: RewardSettings,
) -> Callable[[RewardRequest | GroupRequest], RewardResult | tuple[RewardResult, ...]]:
    config = settings.config
    reward, of_group = build_reward(config, settings.thinking), build_group_reward(config.group)
    text = _reader(settings)

    def score(request: RewardRequest | GroupRequest) -> RewardResult | tuple[RewardResult, ...]:
        if isinstance(request, GroupRequest):
            assert of_group is not None, "the recipe has a group reward"
            return of_group([text(response) for response in request.responses], request.row)
        result = reward(text(request.response), request.row)
        parts = tuple((str(name), float(value)) for name, value in result.parts)
        return RewardResult(float(result.reward), parts)

    return score


def _reader(settings: RewardSettings) -> Callable[[Response], str]:
    """The text of a response, as `Chat.decode` makes it."""
    ends, skips, tokenizer = settings.ends, settings.config.skip_special_tokens, None
    if settings.decoder is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(settings.decoder)

    def text(response: Response) -> str:
        if isinstance(response, str):
            return response
        if tokenizer is None:
            raise TypeError("token ids to a reward process that was given no decoder")
        ids = memoryview(response).cast("i").tolist()
        while ids and ids[-1] in ends:
            ids.pop()
        return str(tokenizer.decode(ids, skip_special_tokens=skips))

    return text


if __name__ == "__main__":
    serve(_scorer)
