"""Renders conversations with a model's chat template: prompts of rows, turns of environments, requests to servers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from asyncrl.config.model import ModelConfig
from asyncrl.data.rows import Thinking
from asyncrl.data.template_calls import shared_start
from asyncrl.data.tool_calls import CallParser, ToolPrompt, parser_for, template_text, with_tools, written
from asyncrl.errors import DataError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message of OpenAI's API and chat templates: role, content, optionally tool_calls, tool_call_id, name."""

QUESTION, REPLY = "question7391", "reply7391"
_RESULT, _THOUGHT = "result7391", "thought7391"
_CALL = {"type": "function", "id": "call73910", "function": {"name": "tool7391", "arguments": {"key7391": "value7391"}}}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWER: Message = {"role": "tool", "name": "tool7391", "tool_call_id": _CALL["id"], "content": _RESULT}
_ASKED: list[Message] = [{"role": "user", "content": QUESTION}]
_SAID: list[Message] = [*_ASKED, {"role": "assistant", "content": REPLY}]

TEXT_ALONE = (
    "{{ begin if begin and not messages[0].content.startswith(begin) }}"
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
"""The template of `model.chat_template=none`. `begin`: what the tokenizer puts before a text, such as `<s>`."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which templates are told whether to think: Qwen's and GLM's, DeepSeek's and Granite's."""
_USED = {"role", "content", "tool_calls", "tool_call_id"}
"""Fields of messages that are rendered, in words at least, whatever the template."""
_MARKUP = re.compile(r"(<[^<>\s]*>|\[[^\[\]\s]*\])\s*$")


class ChatTemplate:
    """The chat template of one tokenizer, with the options of the recipe.

    What the template cannot say is said in words: tool calls in the format `parser` (of `parser_for`), results of tools
    as messages of the user. In messages of users and tools a special token is broken by a space, so that they cannot
    end their turn. `unused`: names of the messages' fields that the template does not render.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, parser: str = "auto") -> None:
        self.text = template_text(tokenizer)
        self.unused: set[str] = set()
        self._tokenizer = tokenizer
        self.parser: CallParser = parser_for(parser, self.text)
        self._options: dict[str, Any] = {}
        if model.enable_thinking is not None:
            self._options |= dict.fromkeys(THINKING_SWITCHES, model.enable_thinking)
        if model.date is not None:  # otherwise transformers gives templates the clock
            self._options["strftime_now"] = datetime.fromisoformat(model.date).strftime
        if self.text == TEXT_ALONE:
            self._options["begin"] = _put_before(tokenizer)
        tokens = tokenizer.added_tokens_decoder.values()
        self._specials = [token.content for token in tokens if token.special and len(token.content) > 1]
        self._firsts = {token[:2] for token in self._specials}
        self._added = {token.content for token in tokens}

    def render(
        self, messages: Sequence[Message], tools: ToolPrompt | None = None, *, asked: str, continues: bool = True
    ) -> str:
        """The conversation up to the start of the assistant's next turn. If the last message is the assistant's, up to
        the end of its text, which the policy continues; without `continues` that turn is closed, and another begun.

        Raises DataError, of `asked`: the template refuses the messages, or leaves out the text of one.
        """
        said = [self._speakable(message, self._knows_results) for message in messages]
        plain, options = with_tools(self._tokenizer, said, tools, told_by=self._tells)
        is_begun = continues and said[-1]["role"] == "assistant" and not said[-1].get("tool_calls")
        if tools is not None and "tools" in options and not tools.is_in(self._apply(plain, asked, **options)):
            tools = replace(tools, in_words=True)
            plain, options = with_tools(self._tokenizer, said, tools, told_by=self._tells)
        if is_begun and len(plain) > 1 and self._stands_alone(plain[-1]):
            text = self._prompt_for(plain[-1]["content"], plain[:-1], asked, options)
        else:
            text = self._apply(plain, asked, continue_final_message=is_begun, **options)
        if is_begun:  # transformers trims the start of a reply
            content = plain[-1]["content"]
            text += content[len(content.rstrip()) :] if text.endswith(content.rstrip()) else ""
        for message in said:
            self._require_said(message, text, asked)
        return text

    def turn(self, messages: Sequence[Message], *, with_tools: bool, asked: str) -> tuple[str, str]:
        """(head, tail): the tail is what the template writes after a reply: `messages`, up to the start of the
        assistant's next turn. `with_tools`: the conversation began with tools. Raises DataError, of `asked`."""
        # Render a dummy conversation and cut it behind its reply: templates offer no rendering of a suffix.
        # The reply of the dummy has no calls: of some templates it could not be followed by a result.
        said = [self._speakable(message, self._shows_results(_SAID[1])) for message in messages]
        text = self._apply([*_SAID, *said], asked, **self._variant(with_tools=with_tools))
        for message in said:
            self._require_said(message, text, asked)
        if REPLY not in text:
            do = "set model.chat_template to one that renders texts"
            raise DataError(explain(asked, "the chat template leaves out the assistant's reply before them", do))
        at = text.index(REPLY) + len(REPLY)
        return text[:at], text[at:]

    def image_text(self, mark: str) -> str:
        """What the template writes for an image, of which `mark` is the token."""
        parts = [{"type": "text", "text": QUESTION}, {"type": "image"}, {"type": "text", "text": REPLY}]
        between = self._rendered([{"role": "user", "content": parts}]).partition(QUESTION)[2].partition(REPLY)[0]
        return between if mark in between else mark

    def harmless(self, text: str) -> str:
        """`text` with a space inserted into every special token, so that it cannot end its turn."""
        begun = any(first in text for first in self._firsts)  # few: many tokenizers have hundreds of special tokens
        for token in self._specials if begun else ():
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def after_reply(self) -> str:
        """What the template writes after a last reply; empty if it renders none."""
        _, found, after = self._rendered(_SAID).rpartition(REPLY)
        return after if found else ""

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The tokens with which a turn of the assistant ends, by the template: after a reply, and after a tool call."""
        head, _, later = self._rendered([*_SAID, *_ASKED]).partition(REPLY)
        # What stands after every reply ends it; what stands only after the last one does where there is no such token.
        reply = self._added_in(shared_start(self.after_reply, later)) or self._added_in(self.after_reply)
        opening = head.partition(QUESTION)[0]
        begins = max((token for token in self._added if token in opening), key=opening.rfind, default="")
        reply = list(itertools.takewhile(lambda token: token != begins, reply))
        call = self._rendered([*_ASKED, _CALLED]).rstrip()
        of_call = [token for token in self._specials if call.endswith(token) and _CALL["function"]["name"] in call]
        return tuple(dict.fromkeys([*reply[-1:], *of_call]))

    @cached_property
    def inner_end(self) -> str:
        """The token that ends a reply in the middle of a conversation, if another one ends the last reply (gpt-oss);
        else empty."""
        later = self._rendered([*_SAID, *_ASKED]).partition(REPLY)[2]
        prompt = self._rendered(_ASKED, add_generation_prompt=True).removeprefix(self._rendered(_ASKED))
        last, inner, opening = (self._added_in(text)[:1] for text in (self.after_reply, later, prompt))
        return inner[0] if last and inner and inner not in (last, opening) else ""

    @cached_property
    def obeys_thinking(self) -> bool:
        """Whether model.enable_thinking changes what the template writes."""
        switches = (dict.fromkeys(THINKING_SWITCHES, on) for on in (False, True))
        return len({self._rendered(_ASKED, add_generation_prompt=True, **switch) for switch in switches}) == 2

    @cached_property
    def thinking(self) -> Thinking:
        """The marks of thoughts as the template writes them; `<think>` if it writes none."""
        said = {**_SAID[1], "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        shown, begun = self._rendered([*_ASKED, said]), self._rendered(_ASKED, add_generation_prompt=True)
        before, found, after = shown.partition(_THOUGHT)
        marks = Thinking()
        if found and REPLY in after:
            # Behind the generation prompt; if that ends with the mark itself, the last markup.
            opening = before.removeprefix(begun).strip() if before.startswith(begun) else ""
            last = _MARKUP.search(before)
            marks = Thinking(opening or (last[0].strip() if last else ""), after.partition(REPLY)[0].strip())
        if not marks.opening or not marks.closing:
            marks = Thinking()
        turn = begun.removeprefix(shared_start(begun, self._rendered(_ASKED)))
        return replace(marks, begun=marks.is_open(turn))

    def _added_in(self, text: str) -> list[str]:
        """The tokens that were added to the vocabulary, such as special ones, at the start of a text, in order."""
        found = []
        while text := text.lstrip():
            token = max((token for token in self._added if token and text.startswith(token)), key=len, default="")
            if not token:
                break
            found.append(token)
            text = text[len(token) :]
        return found

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        """The template's text for a conversation of its own; empty if it refuses it."""
        try:
            return self._apply(messages, "a conversation", **{"add_generation_prompt": False, **options})
        except DataError:
            return ""

    def _apply(self, messages: Sequence[Message], asked: str, **options: Any) -> str:
        options = {"add_generation_prompt": not options.get("continue_final_message"), **self._options, **options}
        plain: Any = [dict(message) for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **options))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            found = f"the chat template fails on messages of {roles}: {str(error).partition(chr(10))[0]}"
            raise DataError(explain(asked, found, "correct the messages' roles or the chat template")) from error

    def _prompt_for(self, content: str, messages: Sequence[Message], asked: str, options: Mapping[str, Any]) -> str:
        """The prompt, and `content` behind it. A thought that both begin is begun once."""
        before = self._apply(messages, asked, **{"add_generation_prompt": False, **options})
        text, opening = self._apply(messages, asked, **options), self.thinking.opening
        at = text.find(opening, len(before)) if text.startswith(before) else -1
        return (text[:at] if at >= 0 and content.lstrip().startswith(opening) else text) + content.rstrip()

    def _stands_alone(self, message: Message) -> bool:
        """Whether the start of a reply goes on from the template's prompt, character for character. If that opens a
        thought of which the reply says nothing, the template must write the reply."""
        marks, content = self.thinking, message.get("content")
        has_thought = isinstance(content, str) and (marks.opening in content or marks.closing in content)
        is_plain = bool(content) and not any(name in self.text for name in message.keys() - {"role", "content"})
        return is_plain and (has_thought or not marks.begun) and self._prompts_replies

    @cached_property
    def _prompts_replies(self) -> bool:
        """Whether a reply stands right behind the template's prompt, but for marks of thoughts."""
        before, found, _ = self._rendered(_SAID).partition(REPLY)
        prompt = self._rendered(_ASKED, add_generation_prompt=True)
        for mark in (self.thinking.opening, self.thinking.closing):
            before, prompt = before.replace(mark, ""), prompt.replace(mark, "")
        return bool(found) and before.split() == prompt.split()

    def _variant(self, *, with_tools: bool) -> dict[str, Any]:
        """The template for conversations with tools, of tokenizers that have one of its own for them."""
        templates = self._tokenizer.chat_template
        own = isinstance(templates, dict) and with_tools and "tool_use" in templates
        return {"chat_template": templates["tool_use"]} if own else {}

    def _require_said(self, message: Message, text: str, asked: str) -> None:
        """Raises DataError: a template that skips unknown roles, for instance, has left out the message."""
        for name in message.keys() - _USED:
            value = message[name]
            is_shown = value.strip() in text if isinstance(value, str) else name in self.text
            if not is_shown:
                self.unused.add(name)
        lost = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if lost and "tool_calls" in self.text and not self._writes_calls:
            do = "set model.chat_template to one that renders tool_calls"
            raise DataError(explain(asked, f"the chat template leaves out the call of {lost[0]}", do))
        content = str(message.get("content") or "")
        if lost and content not in text:  # such templates write the calls of a message alone
            self.unused.add("content of messages with tool_calls")
            content = ""
        if message["role"] == "assistant":  # templates leave out earlier thoughts
            content = content.rpartition(self.thinking.closing)[2]
        for told in (*lost, content.strip()):
            if told not in text and json.dumps(told, ensure_ascii=False)[1:-1] not in text:
                found = f"the chat template leaves out a message of role {message['role']}: {told[:60]!r}"
                do = "give it a role that the template renders, such as system, or set model.chat_template to another"
                raise DataError(explain(asked, found, do))

    def _speakable(self, message: Message, knows_results: bool) -> dict[str, Any]:
        """Converts tool calls to text and tool results to user messages if the template does not support them."""
        said = dict(message)
        if said.get("role") == "developer" and "developer" not in self.text:
            said["role"] = "system"  # the same by OpenAI's definition
        if self.text != TEXT_ALONE and said.get("role") in ("user", "tool") and isinstance(said.get("content"), str):
            said["content"] = self.harmless(said["content"])
        if said.get("tool_calls") and "tool_calls" not in self.text:
            functions = [call["function"] for call in said.pop("tool_calls")]
            calls = [written(function["name"], function["arguments"], self.parser) for function in functions]
            said["content"] = "\n".join([*filter(None, [said.get("content")]), *calls])
        if said.get("role") == "tool" and not knows_results:
            content = f"Result of {said.get('name', 'the tool')}:\n{said.get('content')}"
            return {"role": "user", "content": content}
        return said

    @cached_property
    def _tells(self) -> str:
        """The role of what the recipe tells the policy: system, or user where the template refuses or skips that."""
        told = self._rendered([{"role": "system", "content": _RESULT}, *_ASKED])
        return "system" if _RESULT in told or not self._rendered(_ASKED) else "user"

    @cached_property
    def _writes_calls(self) -> bool:
        for said in ([*_ASKED, _CALLED, _ANSWER], [*_ASKED, _CALLED]):
            plain, _ = with_tools(self._tokenizer, said, None)
            if _CALL["function"]["name"] in self._rendered(plain, **self._variant(with_tools=True)):
                return True
        return False

    @cached_property
    def _knows_results(self) -> bool:
        return self._shows_results(_CALLED) or self._shows_results(_SAID[1])

    def _shows_results(self, reply: Message) -> bool:
        """Whether the template renders a tool's result after `reply`."""
        return _RESULT in self._rendered([*_ASKED, reply, _ANSWER], **self._variant(with_tools=True))


def _put_before(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the special tokens with which the tokenizer begins a text by itself."""
    whole, bare = tokenizer.encode(QUESTION), tokenizer.encode(QUESTION, add_special_tokens=False)
    count = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return "".join(tokenizer.convert_ids_to_tokens(whole[:count]))
