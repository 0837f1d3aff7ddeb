"""One agent's requests, recorded as a tree of conversations over token ids."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.chat.fields import ApiError
from asyncrl.chat.messages import with_names, with_wish
from asyncrl.chat.reply import End, logprob_of
from asyncrl.data.call_splitter import CallFormat, Part, ReplySplitter, joined_parts
from asyncrl.data.chat import Chat
from asyncrl.data.incremental_decoder import IncrementalDecoder
from asyncrl.data.rows import Thinking
from asyncrl.data.stop_strings import StopStrings, StopTable
from asyncrl.data.tool_calls import CallParser, ToolCall, ToolPrompt, tools_for
from asyncrl.environments.agent_requests import AgentReply, AgentRequest, reply_of
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, TrajectoryLimits
from asyncrl.errors import DataError
from asyncrl.remote.tasks import retrieved
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Trajectory

logger = logging.getLogger(__name__)

LOW_SHARE = 0.9
"""Share of an agent's sampled tokens in training, below which the log tells it."""
REJOIN_S = 10.0
"""Time for a client that has lost its connection to send its request again."""
_SHOWN_CHARS = 500
LIMITS = ("max_turns", "context_length_exceeded")
"""Codes of refusals after which an agent should end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A conversation after a reply. `messages`, including the reply, are the text of its token ids. `parent`: the node
    that the request continued; None for the start of a conversation. `number`: of the request, in order of arrival."""

    number: int
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    conversation: Conversation
    last: Generation
    prompt_tokens: int
    parent: _Node | None
    stop: tuple[str, ...]
    """Texts that ended the reply, and are not in its message."""
    reply: AgentReply


@dataclass(slots=True, eq=False)
class Answering:
    """A request whose answer is under way, or made. `number`: in order of arrival. `prompt_ids`: [P] int32.
    `token_ids`: of the answer so far, [T] int32; `heard` is done when there are more, and another takes its place.
    `num_readers`: that wait for it. `is_read`: one has it. `end`: gives it up if nobody comes back for it."""

    number: int
    request: AgentRequest
    prompt_ids: np.ndarray
    work: asyncio.Task[_Node] = field(init=False)
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32), init=False)
    heard: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future(), init=False)
    num_readers: int = 1
    is_read: bool = False
    end: asyncio.TimerHandle | None = None

    @property
    def is_awaited(self) -> bool:
        return not self.is_read and self.num_readers > 0

    def hear(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self.heard.set_result(None)
        self.heard = asyncio.get_running_loop().create_future()


class Speech:
    """The thoughts, texts and calls of one reply, from its tokens, as soon as they are final. They do not depend on how
    the tokens were cut into pieces.

    Args:
        prompt_ids: that it replies to, [P] int32.
    """

    def __init__(self, chat: Chat, parser: CallParser, request: AgentRequest, prompt_ids: np.ndarray) -> None:
        last = request.messages[-1]
        marks = chat.thinking(prompt_ids, last["content"] if last["role"] == "assistant" else "")
        form = CallFormat(parser, request.signatures, request.one_call) if request.tools else None
        written = (marks or Thinking()).opening, *(() if form is None else form.marks)
        self._hidden = chat.specials if chat.specials.search("".join(written)) else None
        """Special tokens in the text, where thoughts or calls are written with some; elsewhere there are none."""
        decode = chat.decode_text if self._hidden is None else chat.decode_turn
        before = [i for i in prompt_ids[-8:].tolist() if i not in chat.ends]
        self._decoder = IncrementalDecoder(lambda ids: decode(np.array(ids, np.int32)), before)
        self._stops = StopStrings(StopTable(request.stop))
        self._splitter = ReplySplitter(marks, form)
        self._num_tokens = 0

    def hear(self, token_ids: np.ndarray) -> list[Part]:
        """What further tokens say. `token_ids`: all so far."""
        new, self._num_tokens = token_ids[self._num_tokens :], len(token_ids)
        return self._said(self._decoder.feed(new.tolist()))

    def finish(self) -> list[Part]:
        """The rest, at the end of the reply."""
        parts = self._said(self._decoder.finish())
        held = "" if self._stops.found is not None else self._stops.finish()
        return [*parts, *self._plain([*self._splitter.feed(held), *self._splitter.finish()])]

    def _said(self, text: str) -> list[Part]:
        if self._stops.found is not None:
            return []
        return self._plain(self._splitter.feed(self._stops.feed(text)))

    def _plain(self, parts: Iterable[Part]) -> list[Part]:
        if self._hidden is None:
            return list(parts)
        plain = (p if isinstance(p, ToolCall) else type(p)(self._hidden.sub("", p)) for p in parts)
        return [part for part in plain if part]


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """The most requests of one trajectory, and the recipe's key for the limit."""

    requests: int
    key: str


@dataclass(eq=False)
class AgentSession:
    """Answers the requests of one agent and records them as a tree. `all_branches`: the trajectory includes the other
    branches.

    A request whose messages begin with an earlier request and its reply continues from the token ids of that reply (the
    longest such). Its further messages are text of the environment. Any other request starts a new branch, possibly
    forked off an earlier reply. A branch ends at a reply that no request continues. The trajectory is the branch of the
    last request.

    Requests are answered concurrently; replies stand in the order in which their requests came. A reply that nobody
    reads is not recorded.
    """

    session: Session
    limits: TrajectoryLimits
    max_turns: TurnLimit
    parser: CallParser
    all_branches: bool = False
    exact: bool = False
    """A reply is recognised by its bytes alone (`rollout.agent.match`)."""
    nodes: list[_Node] = field(default_factory=list, init=False)
    """Of the answered requests."""
    closed: bool = field(default=False, init=False)
    limit_reached: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """A request was refused because of a limit of turns or of length."""
    refusals: list[ApiError] = field(default_factory=list, init=False)
    """What the agent was answered instead of replies."""
    failure: Exception | None = field(default=None, init=False)
    """The error of generation, if any. It fails the trajectory even if the agent handles the error answer."""
    _answering: list[Answering] = field(default_factory=list, init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    @property
    def is_busy(self) -> bool:
        """The agent waits for an answer."""
        return any(asked.is_awaited for asked in self._answering)

    @property
    def told(self) -> str:
        """What the agent has done, for errors."""
        asked, refused = self._answering[-1:], "".join(f"; refused: {error.message}" for error in self.refusals[-1:])
        last = "".join(f"; its last request ends with {str(a.request.messages[-1])[-_SHOWN_CHARS:]}" for a in asked)
        return f"got {len(self.nodes)} replies{last}{refused}"

    def close(self) -> None:
        """The agent has returned: its unfinished requests get errors, and are not in the trajectory."""
        self.closed = True
        for asked in self._answering:
            asked.work.cancel()

    def judged_text(self, said: str | None) -> str:
        """The text for the reward: `said` by the agent, else the last reply, as rewards read responses. Raises
        ValueError: the agent says what we refused it."""
        assert self.nodes, "no request was answered"
        letters = _letters(said or "")
        refused = [e for e in self.refusals if letters and _letters(e.message.partition("\n")[0]) in letters]
        if refused and refused[-1].code not in LIMITS:
            raise ValueError(f"the agent's result is the text of a refusal: {refused[-1].message}")
        if said is None or refused:
            return self.session.decode(self.nodes[-1].last.token_ids)
        # Rewards look for the end of a thought that the prompt begins; what the agent says is behind it.
        marks = self.session.chat.thinking()
        return said if marks is None or not marks.begun or marks.closing in said else marks.closing + said

    def trajectory(self, result: RewardResult) -> Trajectory:
        """The branch of the last request. Its parts count requests and branches.

        With `all_branches` each further branch has only the replies that no earlier branch has, and the prompt of the
        first of these replies.
        """
        assert self.nodes, "no request was answered"
        branches = self._branches()
        sizes = [sum(len(node.last.token_ids) for node in own) for own in branches]
        share = 1.0 if self.all_branches else sizes[0] / max(1, sum(sizes))
        parts = ("agent_requests", float(len(self.nodes))), ("agent_branches", float(len(branches)))
        parts = *parts, ("agent_trained_share", share)
        if share < LOW_SHARE:
            text = "an agent's histories part: %.0f %% of its tokens are trained (rollout.agent.train); first: %s"
            logger.warning(text, 100 * share, self._parting(branches))
        trajectory = self.nodes[-1].conversation.trajectory(result, parts=parts, cut=self.limit_reached.is_set())
        if not self.all_branches:
            return trajectory
        return replace(trajectory, branches=tuple(map(_recorded, branches[1:])))

    def _branches(self) -> list[list[_Node]]:
        """The replies of each branch without the replies of earlier branches: first the branch of the last request,
        then the others in order of their ends. Every reply is in exactly one branch."""
        inner = {id(node.parent) for node in self.nodes}
        leaves = [node for node in self.nodes if id(node) not in inner]
        found, taken = [], set[int]()
        for leaf in (leaves[-1], *leaves[:-1]):
            own, node = [], leaf
            while node is not None and id(node) not in taken:
                own.append(node)
                node = node.parent
            taken |= {id(node) for node in own}
            found.append(own[::-1])
        return found

    async def answer(self, request: AgentRequest) -> AgentReply:
        """Raises ApiError as `begin` and `read`."""
        return await self.read(self.begin(request))

    def begin(self, request: AgentRequest) -> Answering:
        """Starts the answer, which the caller has to `read`. A request that was sent again has the answer of the first
        time, unless another request continued it.

        Raises ApiError: a limit is reached, the model's chat format cannot express the messages, or the agent has
        returned."""
        self._require_open()
        request = replace(request, messages=self._stored(request))
        repeated, request = request.is_repeated or bool(request.key), replace(request, is_repeated=False)
        if repeated and (again := self._asked_before(request)) is not None:
            again.num_readers += 1
            if again.end is not None:
                again.end.cancel()
            return again
        if len(self.nodes) + sum(a.is_awaited for a in self._answering) >= self.max_turns.requests:
            found = f"{len(self.nodes)} requests were answered, {self.max_turns.key}={self.max_turns.requests}"
            raise self._refused(f"{found}; end here", "max_turns")
        # Find the place in the tree, and check its room before anything is sampled.
        parent = self._continued(request)
        conversation, prompt_tokens = self._placed(request, parent)
        room = self.limits.room(prompt_tokens, conversation.num_response_tokens)
        asked = conversation.token_ids
        if room < 1:
            longest = min(self.limits.total_tokens, prompt_tokens + self.limits.response_tokens)
            found = f"the conversation has {len(asked)} tokens, and the maximum context length is {longest} tokens"
            raise self._refused(f"{found}; end here", "context_length_exceeded", "messages")
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        answering = Answering(next(self._numbers), request, asked)
        answering.work = asyncio.create_task(self._answered(answering, parent, conversation, prompt_tokens, limit))
        answering.work.add_done_callback(retrieved)
        self._answering.append(answering)
        return answering

    async def read(self, asked: Answering) -> AgentReply:
        """Waits for the reply, and records it. If all readers leave, it is given up after `REJOIN_S`.

        Raises ApiError: the generation failed, or the agent has returned."""
        try:
            node = await asyncio.shield(asked.work)
        except asyncio.CancelledError:
            self._require_open()
            if asked.num_readers == 1:
                asked.end = asyncio.get_running_loop().call_later(REJOIN_S, self._give_up, asked)
            raise
        finally:
            asked.num_readers -= 1
        # The agent may have returned during the generation: a reply that nobody reads must not be trained.
        self._require_open()
        if not asked.is_read:
            asked.is_read = True
            self.nodes.append(node)
            self.nodes.sort(key=lambda node: node.number)
        return node.reply

    def speech(self, asked: Answering) -> Speech:
        """Of its reply."""
        return Speech(self.session.chat, self.parser, asked.request, asked.prompt_ids)

    def num_tokens(self, request: AgentRequest) -> int:
        """Of its prompt. Raises ApiError."""
        request = replace(request, messages=self._stored(request))
        return len(self._placed(request, self._continued(request))[0].token_ids)

    def _give_up(self, asked: Answering) -> None:
        asked.work.cancel()
        self._answering.remove(asked)

    def _require_open(self) -> None:
        if self.closed:
            raise ApiError(409, "the agent of this conversation has returned")

    def _refused(self, message: str, code: str, param: str | None = None) -> ApiError:
        self.limit_reached.set()
        return ApiError(400, message, param=param, code=code)

    async def _answered(
        self, asked: Answering, parent: _Node | None, conversation: Conversation, prompt_tokens: int, limit: int
    ) -> _Node:
        request, prompt_ids = asked.request, asked.prompt_ids
        try:
            hear = asked.hear if request.stream else None
            made = await self.session.generate(prompt_ids, limit, request.stop, hear)
            conversation.add_response(made)
            asked.hear(made.token_ids)
            speech, further = self.speech(asked), self._token_fields(request, made)
            parts = joined_parts([*speech.hear(made.token_ids), *speech.finish()])
            sizes = len(prompt_ids), len(made.token_ids)
            end = End(made.finish_reason, *sizes, made.segments[-1].version, of_choice=further)
            reply = reply_of(parts, asked.number, end)
        except Exception as error:
            self.failure = error
            raise ApiError(500, f"the generation failed: {error}", code="generation_failed") from error
        tools = request.tools or (() if parent is None else parent.tools)
        messages = *request.messages, reply.message
        return _Node(asked.number, messages, tools, conversation, made, prompt_tokens, parent, request.stop, reply)

    def _token_fields(self, request: AgentRequest, made: Generation) -> dict[str, Any]:
        """What a choice has on request, by vLLM's names: ids and log-probabilities of the tokens."""
        found: dict[str, Any] = {}
        if request.token_ids:
            found = {"token_ids": made.token_ids.tolist(), "prompt_token_ids": made.prompt_ids.tolist()}
        if request.logprobs:
            alone = (self.session.chat.decode_turn(made.token_ids[i : i + 1]) for i in range(len(made.token_ids)))
            told = zip(alone, made.logprobs.tolist(), strict=True)
            found["logprobs"] = {"content": [logprob_of(text, logprob) for text, logprob in told]}
        return found

    def _stored(self, request: AgentRequest) -> tuple[Mapping[str, Any], ...]:
        """Its messages, with images by their keys. Raises ApiError: one is no image, or the model reads none."""
        try:
            return tuple(self.session.chat.stored(request.messages))
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def _placed(self, request: AgentRequest, node: _Node | None) -> tuple[Conversation, int]:
        """The conversation up to the start of the reply, and the number of its prompt tokens. `node`: continued by the
        request. Raises ApiError."""
        chat = self.session.chat
        try:
            if node is None:
                prompt_ids = chat.prompt(with_wish(with_names(request.messages), request.wish), self._tools(request))
                return Conversation(prompt_ids), len(prompt_ids)
            new = with_wish(with_names(request.messages)[len(node.messages) :], request.wish)
            conversation = node.conversation.fork()
            conversation.add_environment(chat.next_turn(node.last.token_ids, new, with_tools=bool(node.tools)))
            return conversation, node.prompt_tokens
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def _asked_before(self, request: AgentRequest) -> Answering | None:
        """The last equal request whose reply no other continued, first one that lost its reader."""
        continued = {id(node.parent) for node in self.nodes}
        same = [asked for asked in self._answering[::-1] if asked.request == request]
        left = (a for a in same if not (a.is_read and id(a.work.result()) in continued))
        return min(left, key=lambda a: (a.is_read, a.is_awaited), default=None)

    def _continued(self, request: AgentRequest) -> _Node | None:
        """The longest node that the request continues; of equally long ones the one whose messages it repeats to the
        letter, else the latest."""
        found, best = None, (0, 0)
        for node in self.nodes:
            pairs = list(zip(node.messages, request.messages, strict=False))
            if len(node.messages) >= len(request.messages) or len(pairs) < best[0]:
                continue
            if node.tools != request.tools and (self.exact or request.tools):
                continue
            if all(_same(a, b) or (not self.exact and self._means(a, b, node.stop)) for a, b in pairs):
                rank = len(pairs), sum(_same(a, b) for a, b in pairs) + (node.tools == request.tools)
                found, best = (node, rank) if rank >= best else (found, best)
        return found

    def _means(self, kept: Mapping[str, Any], sent: Mapping[str, Any], stop: Sequence[str]) -> bool:
        """Whether a message is the kept one, written anew: with other ids of calls, without the text beside them,
        without thoughts, with other blanks, or with the text that ended it."""
        if kept["role"] != sent["role"]:
            return False
        if kept.get("tool_calls") or sent.get("tool_calls"):
            return _calls(kept) == _calls(sent)
        return self._plain(kept, stop) == self._plain(sent, stop)

    def _plain(self, message: Mapping[str, Any], stop: Sequence[str]) -> str:
        if message["role"] != "assistant":
            return message["content"].strip()
        marks = self.session.chat.thinking() or Thinking()
        text = message["content"].rpartition(marks.closing)[2].strip()
        return " ".join(_up_to(text, stop).split())

    def _parting(self, branches: Sequence[Sequence[_Node]]) -> str:
        """The two texts at which the first two branches part."""
        one, other = (branch[-1].messages for branch in branches[:2])
        pairs = ((a, b) for a, b in zip(one, other, strict=False) if not _same(a, b))
        texts = (f"{a['content'][:80]!r} and {b['content'][:80]!r}" for a, b in pairs)
        return next(texts, "one has more messages")

    def _tools(self, request: AgentRequest) -> ToolPrompt | None:
        return tools_for(request.tools, self.parser, self.session.chat.template) if request.tools else None


def _recorded(replies: Sequence[_Node]) -> Trajectory:
    """The trajectory of one branch; each reply continues the previous one."""
    conversation = Conversation(replies[0].last.prompt_ids)
    conversation.started_s = replies[0].conversation.started_s
    for node in replies:
        conversation.add_environment(node.last.prompt_ids[len(conversation.token_ids) :])
        conversation.add_response(node.last)
    return conversation.trajectory(RewardResult(0.0))


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def _letters(text: str) -> str:
    """Without signs, which clients escape."""
    return "".join(filter(str.isalnum, text))


def _up_to(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]


def _same(kept: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """True if both messages mean the same: clients drop empty fields and surrounding blanks."""
    return (
        kept["role"] == sent["role"]
        and kept["content"].strip() == sent["content"].strip()
        and kept.get("reasoning_content", "").strip() == sent.get("reasoning_content", "").strip()
        and kept.get("tool_calls", []) == sent.get("tool_calls", [])
        and kept.get("tool_call_id") == sent.get("tool_call_id")
    )
