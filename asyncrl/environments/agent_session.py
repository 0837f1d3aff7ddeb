"""One agent's requests, recorded as a tree of conversations over token ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.chat.fields import ApiError
from asyncrl.chat.messages import with_names
from asyncrl.chat.reply import End
from asyncrl.data.tool_calls import PARSERS, CallParser, ToolPrompt, text_before_calls, tools_for
from asyncrl.environments.agent_requests import AgentReply, AgentRequest, reply_message
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, TrajectoryLimits
from asyncrl.errors import DataError, GenerationError
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Trajectory

logger = logging.getLogger(__name__)

LOW_SHARE = 0.9
"""Share of an agent's sampled tokens in training, below which the log tells it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A conversation after a reply. `messages`, including the reply, are the text of its token ids. `parent`: the node
    that the request continued; None for the start of a conversation."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    conversation: Conversation
    last: Generation
    prompt_tokens: int
    parent: _Node | None
    stop: tuple[str, ...] = ()
    """Texts that ended the reply, and are not in its message."""
    reply: AgentReply | None = None
    asked: AgentRequest | None = None


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

    Requests are answered one at a time, in order of arrival.
    """

    session: Session
    limits: TrajectoryLimits
    max_turns: TurnLimit
    parser: CallParser
    all_branches: bool = False
    exact: bool = False
    """A reply is recognised by its bytes alone (`rollout.agent.match`)."""
    nodes: list[_Node] = field(default_factory=list, init=False)
    order: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    closed: bool = field(default=False, init=False)
    num_requests: int = field(default=0, init=False)
    cut: bool = field(default=False, init=False)
    """A request was refused because of a limit of turns or of length."""
    failure: Exception | None = field(default=None, init=False)
    """The error of generation, if any. It fails the trajectory even if the agent handles the error answer."""

    def close(self) -> None:
        """The agent has returned: its unfinished requests get errors, and are not in the trajectory."""
        self.closed = True

    def last_text(self) -> str:
        """The last reply's text, as rewards read responses."""
        assert self.nodes, "no request was answered"
        return self.session.decode(self.nodes[-1].last.token_ids)

    def trajectory(self, result: RewardResult) -> Trajectory:
        """The branch of the last request. Its parts count requests and branches.

        With `all_branches` each further branch has only the replies that no earlier branch has, and the prompt of the
        first of these replies.
        """
        assert self.nodes, "no request was answered"
        branches = self._branches()
        sizes = [sum(len(node.last.token_ids) for node in own) for own in branches]
        share = 1.0 if self.all_branches else sizes[0] / max(1, sum(sizes))
        parts = ("agent_requests", float(self.num_requests)), ("agent_branches", float(len(branches)))
        parts = *parts, ("agent_trained_share", share)
        if share < LOW_SHARE:
            text = "an agent's histories part: %.0f %% of its tokens are trained (rollout.agent.train); first: %s"
            logger.warning(text, 100 * share, self._parting(branches))
        trajectory = self.nodes[-1].conversation.trajectory(result, parts=parts, cut=self.cut)
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
        """Raises ApiError: a limit is reached, or the model's chat format cannot express the messages."""
        async with self.order:
            request = replace(request, messages=self._stored(request))
            repeated, request = request.is_repeated, replace(request, is_repeated=False)
            if repeated and (again := self._answered(request)) is not None:
                return again
            if self.num_requests >= self.max_turns.requests:
                self.cut = True
                found = f"{self.num_requests} requests were made, {self.max_turns.key}={self.max_turns.requests}"
                raise ApiError(400, f"{found}; end here", code="max_turns")
            # Find the place in the tree, and check its room before anything is sampled.
            parent = self._continued(request)
            conversation, prompt_tokens = self._placed(request, parent)
            room = self.limits.room(prompt_tokens, conversation.num_response_tokens)
            if room < 1:
                self.cut = True
                found = f"the conversation has {len(conversation.token_ids)} tokens and leaves no room for an answer"
                raise ApiError(400, f"{found}; end here", param="messages", code="context_length_exceeded")
            asked = conversation.token_ids
            limit = room if request.max_tokens is None else min(room, request.max_tokens)
            try:
                made = await self.session.generate(asked, limit, request.stop)
            except GenerationError as error:
                self.failure = error
                raise ApiError(500, f"the generation failed: {error}", code="generation_failed") from error
            # The agent may have returned during the generation: a reply that nobody reads must not be trained.
            if self.closed:
                raise ApiError(409, "the agent of this conversation has returned")
            self.num_requests += 1
            conversation.add_response(made)
            chat = self.session.chat
            text = chat.decode_turn(made.token_ids)
            calls = PARSERS[self.parser](text, request.signatures) if request.tools else []
            calls = calls[:1] if request.one_call else calls
            before = chat.decode_text(chat.encode(text_before_calls(text, self.parser, request.signatures)))
            said = _up_to(chat.decode_text(made.token_ids), request.stop)
            message = reply_message(said, before, calls, self.num_requests)
            reason = "tool_calls" if "tool_calls" in message else made.finish_reason
            reply = AgentReply(message, End(reason, len(asked), len(made.token_ids), made.segments[-1].version))
            tools = request.tools or (() if parent is None else parent.tools)
            messages = *request.messages, message
            node = _Node(messages, tools, conversation, made, prompt_tokens, parent, request.stop, reply, request)
            self.nodes.append(node)
            return reply

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
                prompt_ids = chat.prompt(with_names(request.messages), self._tools(request))
                return Conversation(prompt_ids), len(prompt_ids)
            new = with_names(request.messages)[len(node.messages) :]
            conversation = node.conversation.fork()
            conversation.add_environment(chat.next_turn(node.last.token_ids, new, with_tools=bool(node.tools)))
            return conversation, node.prompt_tokens
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def _answered(self, request: AgentRequest) -> AgentReply | None:
        """The reply to the same request, if no other continued it."""
        continued = {id(node.parent) for node in self.nodes}
        same = [node for node in self.nodes if node.asked == request]
        return next((node.reply for node in same[::-1] if id(node) not in continued), None)

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
        text = self.session.chat.without_thoughts(message["content"]).strip()
        text = next((text.removesuffix(end) for end in stop if text.endswith(end)), text)
        return " ".join(text.split())

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


def _up_to(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]


def _same(kept: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """True if both messages mean the same: clients drop empty fields and surrounding blanks."""
    return (
        kept["role"] == sent["role"]
        and kept["content"].strip() == sent["content"].strip()
        and kept.get("tool_calls", []) == sent.get("tool_calls", [])
        and kept.get("tool_call_id") == sent.get("tool_call_id")
    )
