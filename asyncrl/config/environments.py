from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from asyncrl.config.checks import require_at_most_one, require_one_group, require_stop_text, require_url, section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import Positive, PositiveInt

JUDGES = ("gymnasium", "openenv", "verifiers", "nemo_gym")
"""Environments that give the reward themselves; their recipes set `reward.function=zero`. So do those of custom ones
with `judges = True`, which a name like `package.module:Name` does not tell."""


@section("rollout.tool_use.mcp.")
class McpServerConfig:
    command: list[str] = field(default_factory=list)
    """Command line of a server that speaks on standard input and output. Each rollouter starts one."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its process, in addition to HOME, PATH, USER and the like. It gets no other variables of the run."""
    url: str = ""
    """Address of a server that speaks streamable HTTP, instead of a command."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request to the url, such as a key: `{Authorization: "Bearer ${oc.env:KEY}"}`."""
    tools: list[str] = field(default_factory=list)
    """Tools to offer, by the server's names. Empty: all."""
    start_timeout_s: Positive = 30.0
    """Longest time until it lists its tools."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            asked = f"rollout.tool_use.mcp with command={self.command} and url={self.url}"
            found = "a server is either started or asked at its address"
            raise ConfigError(explain(asked, found, "set one of command and url"))
        require_url("rollout.tool_use.mcp.url", self.url)


@section("rollout.tool_use.")
class ToolUseConfig:
    tools: list[str] = field(default_factory=lambda: ["calculator"])
    """Names from asyncrl.environments.tools (calculator, python, search), or custom `package.module:Name`."""
    parser: Literal["auto", "hermes", "json", "tagged"] = "auto"
    """How calls are found in the text. hermes: JSON between <tool_call> tags (Qwen). json: a bare JSON object (Llama
    3). tagged: `<name>arguments</name>`. auto: as the chat template writes calls."""
    max_turns: PositiveInt = 4
    """Responses of the policy in one trajectory."""
    max_trajectory_tokens: PositiveInt | None = None
    """Limit on the tokens of all responses and tool results together. None takes
    rollout.sampling.max_response_tokens times max_turns, as far as the model's length allows."""
    max_result_tokens: PositiveInt = 256
    """A longer tool result is cut, with a note."""
    tool_timeout_s: Positive = 10.0
    """Longest time for one call; the policy is then told that the call took too long."""
    tool_workers: PositiveInt = 2
    """Processes that run tools, except tools of MCP servers."""
    mcp: dict[str, McpServerConfig] = field(default_factory=dict)
    """MCP servers whose tools the policy may call too: name -> command or url (docs/environments.md). Needs the package
    mcp."""
    corpus: str | None = None
    """JSONL file of {"title", "text"} that the tool search looks in; each worker holds its index."""
    allow_basic_sandbox: bool = False
    """Run the tool python even if the machine lacks Landlock or seccomp (docs/rewards.md)."""

    def __post_init__(self) -> None:
        if not (self.tools or self.mcp):
            do = "name one, or a server in rollout.tool_use.mcp, or set rollout.environment=single_turn"
            raise ConfigError(explain("rollout.tool_use.tools=[]", "environment tool_use without a tool", do))
        if "search" in self.tools and self.corpus is None:
            asked, found = "rollout.tool_use.tools with search", "rollout.tool_use.corpus is not set"
            raise ConfigError(explain(asked, found, "name a JSONL file of documents"))


@section("rollout.interleaved_tool_use.")
class InterleavedConfig:
    open: str = "<tool>"
    """Text that opens a call. Between it and the closing text: JSON with name and arguments; with one tool also its
    arguments alone as a JSON object, or the text of its first parameter."""
    close: str = "</tool>"
    """Text that closes a call: generation stops there and continues after the result, also where it occurs in the
    opening text."""
    result_open: str = "<result>"
    """Text before a result."""
    result_close: str = "</result>"
    """Text after a result."""
    max_calls: PositiveInt = 4
    """Calls in one response; it is cut off at the next one. rollout.sampling.max_response_tokens holds for the whole
    response, results included."""
    describe_tools: bool = True
    """A system message in every prompt describes the tools and the format of calls. False: the prompts of the data
    do."""
    judged: Literal["last", "response"] = "last"
    """The reward judges the text after the last result, or the whole response including results."""

    def __post_init__(self) -> None:
        for name, text in (("open", self.open), ("close", self.close)):
            require_stop_text(f"rollout.interleaved_tool_use.{name}", text)

    def require_apart(self, stop: list[str]) -> None:
        """Raises ConfigError: the end of a response and the end of a call could not be told apart."""
        for text in stop:
            if text in self.close or self.close in text:
                asked = f"rollout.sampling.stop={text!r} with rollout.interleaved_tool_use.close={self.close!r}"
                found = "the one is in the other: what ends a response could not be told from what closes a call"
                do = "leave it out of rollout.sampling.stop, or choose another closing text"
                raise ConfigError(explain(asked, found, do))


@section("rollout.agent.sandbox.")
class SandboxConfig:
    backend: str = "none"
    """Where the program of `rollout.agent.command` runs. none: as a process of this machine with the rights of the run.
    local: confined on this machine (Linux). docker, podman, apptainer: in a container. Or `package.module:Name` of
    your own (docs/environments.md)."""
    image: str = ""
    """Image of the containers, with tar in it. For apptainer also a file."""
    options: list[str] = field(default_factory=list)
    """Further options of `docker run`, `podman run` or `apptainer exec`. Without one for the network, containers have
    that of the machine."""
    files: str = ""
    """Directory that each sandbox gets a copy of as its working directory. A row may name a directory below it, as
    `files` in its `extra_info`. Empty: the image has the files."""
    readable: list[str] = field(default_factory=list)
    """Files and directories of this machine that a sandbox may read, at the same path, such as a virtual environment.
    Files in the command are among them."""
    check: list[str] = field(default_factory=list)
    """Command that judges what the agent has done, such as `[python3, -m, pytest, -q]`. With reward zero its exit code
    decides: 1 for 0, else 0. Any other reward gets its standard output as the response."""
    solution: list[str] = field(default_factory=list)
    """Files and directories that the agent may change, relative to its working directory. For the check all else is as
    it was at first."""
    start_timeout_s: Positive = 60.0
    """Longest time for the start of a sandbox, its reset or its end; the attempt then fails."""
    check_timeout_s: Positive = 60.0
    """Longest time for the check, which has then failed."""
    memory_bytes: PositiveInt = 1 << 32
    """Of backend local: private memory of one process."""
    max_processes: PositiveInt = 256
    """Of backend local, with namespaces: processes and threads of one sandbox; all are ended at more."""

    def __post_init__(self) -> None:
        plain = [path for path in self.solution if re.fullmatch(r"(?!.*(^|/)\.{1,2}(/|$))[^/-].*", path)]
        if bool(plain) != bool(self.check) or plain != self.solution:
            asked = f"rollout.agent.sandbox with check={self.check} and solution={self.solution}"
            found = "a check needs to know what of the working directory is the agent's: paths inside of it"
            do = "set both, such as check=[python3, -m, pytest] and solution=[src]"
            raise ConfigError(explain(asked, found, do))


@section("rollout.agent.")
class AgentConfig:
    function: str = ""
    """For environment agent: `package.module:function`, async, called with the address of an OpenAI endpoint, the key
    of its trajectory and the task. tool_use.parser and tool_use.max_trajectory_tokens apply to agents too."""
    command: list[str] = field(default_factory=list)
    """Instead of a function: a program, started per trajectory, with the task on its standard input, the endpoint in
    OPENAI_BASE_URL and the key in OPENAI_API_KEY. Its standard output is judged (docs/environments.md)."""
    max_programs: PositiveInt = 64
    """Concurrent programs of a rollouter, and their sandboxes; others wait, within rollout.trajectory_timeout_s."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where the program runs, and what judges its work."""
    max_turns: PositiveInt = 8
    """Requests that an agent may make in one trajectory; further ones are refused."""
    grace_s: Positive = 10.0
    """Time for an agent to end by itself after its first request beyond a limit. Then it is ended, and the policy's
    last reply is judged."""
    train: Literal["auto", "last_branch", "all_branches"] = "auto"
    """Trained part of an agent with several conversations, or a rewritten one. last_branch: the conversation of the
    last request. all_branches: every reply, once, with the advantage of the trajectory. auto: all_branches, but
    last_branch with an advantage along one conversation (gae, reinforce_plus_plus) or router replay. Also of
    environment verifiers, and of custom ones that return branches."""
    match: Literal["meaning", "exact"] = "meaning"
    """When a reply that an agent sends back counts as the policy's, whose conversation then goes on. meaning: its calls
    are the same, or its text is, without thoughts and blanks. exact: nothing but blanks around it differs."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on, of the machine of the rollouter; 0.0.0.0 lets other machines in. Every
    request needs the key of a running trajectory."""
    port: Annotated[int, Ge(0), Lt(2**16)] = 0
    """Port that it listens on; 0 takes a free one. Several rollouters need free ones."""
    advertise: str = ""
    """Base URL given to agents that reach the endpoint at another address, from a container or through a proxy:
    `http://host.docker.internal:{port}/v1`. {host} and {port} stand for the rollouter's machine and the port. Empty:
    `http://HOST:PORT/v1` of the address that it listens on."""

    def __post_init__(self) -> None:
        require_at_most_one("rollout.agent", function=self.function, command=self.command)
        plain = re.sub(r"\{(host|port)\}", "1", self.advertise)
        if self.advertise and re.fullmatch(r"https?://[^\s{}]+/v1", plain) is None:
            asked, found = f"rollout.agent.advertise={self.advertise}", "no base URL of an OpenAI client"
            do = "write http://HOST:PORT/v1; {host} and {port} may stand in it"
            raise ConfigError(explain(asked, found, do))


@section("rollout.gymnasium.")
class GymnasiumConfig:
    id: str = ""
    """For environment gymnasium: an id that gymnasium.make knows, or `module:id` to import the module that registers it
    first."""
    factory: str = ""
    """Instead of an id: `package.module:function`, called with kwargs, which returns a gymnasium.Env."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, such as `{render_mode: ansi}`: its text rendering is then the
    observation."""
    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in order. The last name in a response is the action; without names, the
    last whole number."""
    action_pattern: str = ""
    """Regular expression with one group; the group of its last match in a response is, or contains, the action. Empty:
    the whole response."""
    max_turns: PositiveInt = 16
    """Actions in one trajectory. tool_use.max_trajectory_tokens applies to it too; None takes
    rollout.sampling.max_response_tokens and max_observation_tokens, together, times max_turns."""
    max_observation_tokens: PositiveInt = 512
    """A longer observation is cut, with a note."""
    reward: Literal["sum", "final"] = "sum"
    """Reward of a trajectory: the sum of its actions' rewards, or the last one."""
    workers: PositiveInt = 2
    """Processes that hold the environments of all trajectories of a rollouter."""
    step_timeout_s: Positive = 30.0
    """Longest time for one reset or step; the process is then killed, and the attempts of its environments fail."""

    def __post_init__(self) -> None:
        require_at_most_one("rollout.gymnasium", id=self.id, factory=self.factory)
        if self.action_pattern:
            require_one_group("rollout.gymnasium.action_pattern", self.action_pattern)


@section("rollout.openenv.")
class OpenEnvConfig:
    url: str = ""
    """For environment openenv: address of a server, `http://HOST:PORT`."""
    action: str = ""
    """Key of the action's JSON object that gets the text of a response. Empty: the text is that object."""
    action_tag: str = ""
    """The text between the last `<TAG>` and `</TAG>` of a response is the action. Empty: the whole response."""
    observation: str = ""
    """Key of the observation whose value the policy reads. Empty: all of it, as JSON."""
    max_turns: PositiveInt = 16
    """Actions in one trajectory. tool_use.max_trajectory_tokens applies to it too; None takes
    rollout.sampling.max_response_tokens and max_observation_tokens, together, times max_turns."""
    max_observation_tokens: PositiveInt = 512
    """A longer observation is cut, with a note."""
    reward: Literal["sum", "final"] = "sum"
    """Reward of a trajectory: the sum of its actions' rewards, or the last one."""
    max_sessions: PositiveInt = 16
    """Sessions of a rollouter at the same time; further trajectories wait, within rollout.trajectory_timeout_s. The
    server must take them (its max_concurrent_envs)."""
    step_timeout_s: Positive = 30.0
    """Longest time for one reset or step; after it the attempt fails."""

    def __post_init__(self) -> None:
        require_url("rollout.openenv.url", self.url, schemes=("http", "https", "ws", "wss"))


@section("rollout.nemo_gym.")
class NemoGymConfig:
    head: str = "http://127.0.0.1:11000"
    """For environment nemo_gym: address of NeMo Gym's head server, which knows the others. Its model server asks
    rollout.agent.host and port, which therefore has to be set."""
    agent: str = ""
    """The agent of rows without agent_ref."""
    max_turns: PositiveInt = 32
    """Requests of one trajectory; further ones are refused."""


@section("rollout.verifiers.")
class VerifiersConfig:
    env: dict[str, Any] = field(default_factory=dict)
    """For environment verifiers: the `[env]` section of its config, such as `{taskset: {id: NAME}}`."""
    max_tasks: PositiveInt = 10000
    """Tasks of the taskset that are loaded."""
    max_turns: PositiveInt = 32
    """Requests of all agents of an episode together; further ones are refused. rollout.agent.host, port and advertise
    say where the endpoint listens, and tool_use.parser and max_trajectory_tokens apply too."""
