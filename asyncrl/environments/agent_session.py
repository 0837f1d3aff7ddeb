"""One agent's requests, recorded as a tree of conversations over token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.data.tool_calls import PARSERS, ParserName, described
from asyncrl.data.tool_prompt import ToolPrompt
from asyncrl.environments.agent_requests import AgentReply, AgentRequest, reply_message
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session
from asyncrl.environments.limits import TrajectoryLimits
from asyncrl.errors import DataError, GenerationError
from asyncrl.rewards import RewardResult
from asyncrl.serving.errors import ApiError
from asyncrl.serving.messages import with_names
from asyncrl.types import Generation, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A conversation after a reply: `messages`, the reply included, are the text of its token ids."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    conversation: Conversation
    last: Generation
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """The most requests of one trajectory, and the key of the recipe that says so."""

    requests: int
    key: str


class AgentSession:
    """Answers the requests of one agent and records them as a tree.

    A request whose messages begin with those of an earlier request and its reply continues from the token ids of that
    reply; of several, from the longest. The further messages are text of the environment. Any other request begins a
    branch of its own, or one that forks off an earlier reply. The branch of the last request is the trajectory.

    Requests are answered one after another, in the order in which they arrive.
    """

    def __init__(self, session: Session, limits: TrajectoryLimits, max_turns: TurnLimit, parser: ParserName) -> None:
        self._session = session
        self._limits = limits
        self._max_turns = max_turns
        self._parser: ParserName = parser
        self._nodes: list[_Node] = []
        self._order = asyncio.Lock()
        self.num_requests = 0
        self.num_branches = 0
        self.cut = False
        """A request was refused because of a limit: of turns, or of length."""
        self.failure: Exception | None = None
        """The error of generation, if any. It fails the trajectory however the agent reacts to the error answer."""

    @property
    def last(self) -> _Node | None:
        return self._nodes[-1] if self._nodes else None

    def last_text(self) -> str:
        """Of the last reply, with nothing but its text."""
        assert self._nodes, "no request was answered"
        return self._session.decode(self._nodes[-1].last.token_ids)

    def trajectory(self, result: RewardResult) -> Trajectory:
        """The branch of the last request. Its parts count requests and branches."""
        assert self._nodes, "no request was answered"
        parts = ("agent_requests", float(self.num_requests)), ("agent_branches", float(self.num_branches))
        return self._nodes[-1].conversation.trajectory(result, parts=parts, cut=self.cut)

    async def answer(self, request: AgentRequest) -> AgentReply:
        """Raises ApiError: a limit is reached, or the model's chat format cannot express the messages."""
        async with self._order:
            if self.num_requests >= self._max_turns.requests:
                self.cut = True
                found = f"{self.num_requests} requests were made, {self._max_turns.key}={self._max_turns.requests}"
                raise ApiError(400, f"{found}; end here", code="max_turns")
            self.num_requests += 1
            conversation, prompt_tokens = self._placed(request)
            room = self._limits.room(prompt_tokens, conversation.num_response_tokens)
            if room < 1:
                self.cut = True
                found = f"the conversation has {len(conversation.token_ids)} tokens and leaves no room for an answer"
                raise ApiError(400, f"{found}; end here", param="messages", code="context_length_exceeded")
            asked = conversation.token_ids
            limit = room if request.max_tokens is None else min(room, request.max_tokens)
            try:
                made = await self._session.generate(asked, limit)
            except GenerationError as error:
                self.failure = error
                raise ApiError(500, f"the generation failed: {error}", code="generation_failed") from error
            conversation.add_response(made)
            text = self._session.chat.decode_turn(made.token_ids)
            calls = PARSERS[self._parser](text, request.signatures) if request.tools else []
            message = reply_message(self._session.decode(made.token_ids), calls, self.num_requests)
            self._nodes.append(_Node((*request.messages, message), request.tools, conversation, made, prompt_tokens))
            reason = "tool_calls" if "tool_calls" in message else made.finish_reason
            return AgentReply(message, reason, len(asked), len(made.token_ids), made.segments[-1].version)

    def _placed(self, request: AgentRequest) -> tuple[Conversation, int]:
        """The conversation up to where the reply begins, and the tokens of its prompt. Raises ApiError."""
        chat = self._session.chat
        node = self._continued(request)
        try:
            if node is None:
                self.num_branches += 1
                prompt_ids = chat.prompt(_for_template(request.messages), self._tools(request))
                return Conversation(prompt_ids), len(prompt_ids)
            self.num_branches += node is not self._nodes[-1]
            new = _for_template(request.messages)[len(node.messages) :]
            conversation = node.conversation.fork()
            conversation.add_environment(chat.next_turn(node.last.token_ids, new))
            return conversation, node.prompt_tokens
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def _continued(self, request: AgentRequest) -> _Node | None:
        """The longest node that the request continues; of equally long ones the latest."""
        found = None
        for node in self._nodes:
            size = len(node.messages)
            if size < len(request.messages) and (found is None or size >= len(found.messages)):
                same = all(_same(a, b) for a, b in zip(node.messages, request.messages, strict=False))
                if same and node.tools == request.tools:
                    found = node
        return found

    def _tools(self, request: AgentRequest) -> ToolPrompt | None:
        return ToolPrompt(request.tools, described(request.tools, self._parser)) if request.tools else None


def _same(kept: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """True when both messages mean the same: clients drop empty fields, and blanks around a text."""
    return (
        kept["role"] == sent["role"]
        and kept["content"].strip() == sent["content"].strip()
        and kept.get("tool_calls", []) == sent.get("tool_calls", [])
        and kept.get("tool_call_id") == sent.get("tool_call_id")
    )


def _for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return with_names(messages)
