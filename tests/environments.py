"""What tests of environments share: tokenizers with known chat templates, and a session that says what it is told."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.model import ModelConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments import Chat
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Segment
from tools.make_tiny_vision import build

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nreturn <tool_call>\\n{\\"name\\": <name>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen2.5's and Qwen3's way, shortened: thoughts of earlier turns are dropped, results stand in a user's turn."""

PLAIN = """{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{%- endif %}
{{- '[' + message.role + '] ' + message.content + (' </s>' if message.role == 'assistant' else '') }}
{%- endfor %}{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
"""Knows neither tools nor their results, and has no special token but the end of a reply."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
"""A tool, as a request to a server names it."""

SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>", "</s>"]


def tokenizer_with(template: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Bytes are tokens, and so are frequent pairs of letters: a text tokenizes differently next to another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("a", "n"), ("o", "o"), ("oo", "l"), ("Ċ", "Ċ"), ("1", "2"), (">", "Ċ")]
    vocabulary = {t: i for i, t in enumerate([*SPECIALS, *alphabet, *("".join(p) for p in pairs)])}
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, chat_template=template, clean_up_tokenization_spaces=False
    )


def chat_with(template: str = QWEN, eos: str = "<|im_end|>") -> Chat:
    return Chat(tokenizer_with(template, eos), ModelConfig(path="/"))


def vision_model(root) -> ModelConfig:
    """The section of a tiny model that reads images, whose files are written below `root`."""
    model, processor = build()
    model.config.save_pretrained(root / "model")
    processor.save_pretrained(root / "model")
    return ModelConfig(path=str(root / "model"), image_directory=str(root / "images"))


def chat_with_images(root) -> Chat:
    named = vision_model(root)
    return Chat(load_tokenizer(named), named)


@asynccontextmanager
async def opened(thing):
    """Starts it, and closes it at the end."""
    await thing.start()
    try:
        yield thing
    finally:
        await thing.close()


class ScriptedSession:
    """Says `replies` in turn, one token at a time spelled, so that their ids are none that the tokenizer would make."""

    def __init__(self, chat: Chat, *replies: str | Exception, end: str = "<|im_end|>", limit: int = 10_000) -> None:
        self.chat = chat
        self.prompts: list[np.ndarray] = []
        self.made: list[Generation] = []
        self.budgets: list[int | None] = []
        self.rewarded: list[str] = []
        self._replies = list(replies)
        self._end = end
        self._limit = limit

    async def generate(self, prompt_ids, max_tokens=None, stop=(), hear=None):
        self.prompts.append(np.array(prompt_ids))
        self.budgets.append(max_tokens)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        ids = np.concatenate([*(self.chat.encode(letter) for letter in reply), self.chat.encode(self._end)])
        limit = min(self._limit, max_tokens or self._limit)
        reason = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        half = len(ids) // 2
        cuts = [(0, half), (half, len(ids))] if half else [(0, len(ids))]
        segments = tuple(Segment(a, b, len(self.prompts) + i, i) for i, (a, b) in enumerate(cuts))
        self.made.append(Generation(self.prompts[-1], ids, -np.ones(len(ids), np.float32), segments, reason))
        return self.made[-1]

    def decode(self, token_ids):
        return self.chat.decode(token_ids)

    async def reward(self, response, row):
        self.rewarded.append(response if isinstance(response, str) else self.decode(response))
        return RewardResult(1.0, (("correct", 1.0),))


def task_of(prompt_ids, content="what?", **extra):
    message = ChatMessage("user", content)
    row = PromptRow((message,), "4", "test", tuple((key, json.dumps(value)) for key, value in extra.items()), "test:1")
    return SimpleNamespace(row=row, prompt_ids=np.asarray(prompt_ids, np.int32), ordinal=0, index=0)


async def play(environment, *replies, task=None, chat=None, **script):
    """The trajectory of a policy that says `replies`, and its session."""
    session = ScriptedSession(chat or chat_with(), *replies, **script)
    async with asyncio.timeout(100):
        return await environment.run(task or task_of(session.chat.encode("what?")), session), session


def call_text(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def assert_exact(trajectory, session):
    """Every prompt is the tokens of before and more; the trajectory is all of them, masked where others wrote."""
    trajectory.validate()
    whole = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    for before, after in zip(session.prompts, session.prompts[1:], strict=False):
        assert np.array_equal(after[: len(before)], before)
    for prompt in session.prompts:
        assert np.array_equal(whole[: len(prompt)], prompt)
    for segment in trajectory.segments:
        mine = segment.kind == "policy"
        assert (trajectory.loss_mask[segment.start : segment.stop] == mine).all()
        assert (trajectory.logprobs[segment.start : segment.stop] == (-1.0 if mine else 0.0)).all()
    assert sum(s.kind == "environment" for s in trajectory.segments) == len(session.prompts) - 1
