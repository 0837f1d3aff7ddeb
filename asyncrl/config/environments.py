from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseConfig:
    tools: list[str] = field(default_factory=lambda: ["calculator"])
    """Names from asyncrl.environments.tools (calculator, python, search), or custom `package.module:Name`."""
    parser: Literal["auto", "hermes", "json", "tagged"] = "auto"
    """How calls are found in the text. hermes: JSON between <tool_call> tags (Qwen). json: a bare JSON object (Llama
    3). tagged: `<name>arguments</name>`. auto: by the chat template."""
    max_turns: PositiveInt = 4
    """Responses of the policy in one trajectory."""
    max_trajectory_tokens: PositiveInt | None = None
    """Limit on the tokens of all responses and tool results together. None takes
    rollout.sampling.max_response_tokens times max_turns, as far as the model's length allows."""
    max_result_tokens: PositiveInt = 256
    """A longer tool result is cut, with a note."""
    tool_timeout_s: Positive = 10.0
    """Longest time for one call; after it the policy reads that the call took too long."""
    tool_workers: PositiveInt = 2
    """Processes that run tools."""
    corpus: str | None = None
    """JSONL file of {"title", "text"} that the tool search looks in; each worker holds its index."""
    allow_basic_sandbox: bool = False
    """Run the tool python even where the machine offers less confinement than Landlock and seccomp
    (docs/rewards.md)."""

    def __post_init__(self) -> None:
        check_ranges("rollout.tool_use.", self)
        require(
            bool(self.tools),
            asked="rollout.tool_use.tools=[]",
            found="environment tool_use without a tool",
            do="name one, or set rollout.environment=single_turn",
        )
        require(
            "search" not in self.tools or self.corpus is not None,
            asked="rollout.tool_use.tools with search",
            found="rollout.tool_use.corpus is not set",
            do="name a JSONL file of documents",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    function: str = ""
    """For environment agent: `package.module:function`, async, called with the address of an OpenAI endpoint, the key
    of its trajectory and the task. tool_use.parser and tool_use.max_trajectory_tokens apply to agents too."""
    max_turns: PositiveInt = 8
    """Requests that an agent may make in one trajectory; further ones are refused."""

    def __post_init__(self) -> None:
        check_ranges("rollout.agent.", self)
