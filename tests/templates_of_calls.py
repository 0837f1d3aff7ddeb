"""Chat templates of tests, each with calls in the shape of one family of models, or of none."""

from types import SimpleNamespace
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from asyncrl.data.tool_calls import ToolCall, with_tools

EACH = "{% for c in m.tool_calls %}"
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
END = "{% endfor %}"
COMMA = "{{ ', ' if not loop.last }}"
OBJECT = '{"name": "' + NAME + '", "arguments": ' + JSON + "}"

CALLS = {
    "qwen3-coder": f"{EACH}<tool_call>\n<function={NAME}>\n{PAIRS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n{END}"
    f"</function>\n</tool_call>{END}",
    "glm": f"{EACH}\n<tool_call>{NAME}\n{PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{END}"
    f"</tool_call>{END}",
    "minimax": f'<mm:tool_call>\n{EACH}<invoke name="{NAME}">\n{PAIRS}<parameter name="{{{{ k }}}}">{VALUE}'
    f"</parameter>\n{END}</invoke>\n{END}</mm:tool_call>",
    "gemma": f"{EACH}<|tool_call>call:{NAME}{{{{ '{{' }}}}{PAIRS}{{{{ k }}}}:"
    f"{{{{ '<|q|>' ~ v ~ '<|q|>' if v is string else v | tojson }}}}{{{{ ',' if not loop.last }}}}{END}}}"
    f"<tool_call|>{END}",
    "gpt-oss": f"{EACH} to=functions.{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>{END}",
    "deepseek": f"<calls><call>{EACH}{{{{ '\\n<call>' if not loop.first }}}}{{{{ c.type }}}}<sep>{NAME}\n```json\n"
    f"{{{{ c.function.arguments + '' }}}}\n```</call>{END}</calls>",
    "deepseek-v3.1": f"<calls>{EACH}<call>{NAME}<sep>{JSON}</call>{END}</calls>",
    "kimi": f"<section>{EACH}<call>functions.{NAME}:{{{{ loop.index0 }}}}<args>{JSON}</call>{END}</section>",
    "by id": f"{EACH}<call>{{{{ c.id }}}}<args>{JSON}</call>{END}",
    "mistral": f'[TOOL_CALLS] [{EACH}{OBJECT[:-1]}, "id": "{{{{ c.id }}}}"}}{COMMA}{END}]',
    "mistral-v11": f"{EACH}[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{JSON}{END}",
    "mistral-v13": f"{EACH}[TOOL_CALLS]{NAME}[ARGS]{JSON}{END}",
    "cohere": '<|START_ACTION|>[\n{% for c in m.tool_calls %}{"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
    + f'{NAME}", "parameters": {JSON}}}{COMMA}{END}\n]<|END_ACTION|><|END_OF_TURN|>',
    "phi": f"<|tool_call|>[{EACH}{OBJECT}{COMMA}{END}]<|/tool_call|>",
    "hunyuan": f"<tool_calls>{EACH}\n<tool_call>{NAME}\n```json\n{JSON}\n```\n</tool_call>{END}\n</tool_calls>",
    "functionary": f"{EACH}<function={NAME}>{JSON}</function>{END}",
    "lfm": f"<|calls|>[{EACH}{NAME}({PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{END}){COMMA}{END}]<|/calls|>",
    "olmo": f"<function_calls>{EACH}{NAME}({PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{END})\n{END}"
    "</function_calls>",
    # Of no model:
    "typed": f"<do>{EACH}<act is='{NAME}'>{PAIRS}<with k='{{{{ k }}}}' "
    f"string='{{{{ 'true' if v is string else 'false' }}}}'>{VALUE}</with>{END}</act>{END}</do>",
    "brackets": f"{EACH}[run {NAME}]\n{PAIRS}[[{{{{ k }}}}]]{VALUE}[[/]]\n{END}[/run]{END}",
    "nested": f'<act>{EACH}{{"do": {{"what": "{NAME}", "how": {JSON}}}}}{COMMA}{END}</act>',
    "react": f"{EACH}Action: {NAME}\nAction Input: {JSON}\n{END}",
}
"""Name -> the calls of one message `m`."""


def template_of(calls: str) -> str:
    end = "" if calls == CALLS["gpt-oss"] else "<|end|>"  # its calls end a turn otherwise than its replies
    return (
        "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
        + calls
        + end
        + "{% else %}{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def reply_with(template: str, *calls: ToolCall) -> str:
    """The assistant's turn with these calls, as the template writes it."""
    made = [
        {
            "type": "function",
            "id": f"functions.{call.name}:{number}",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": made}]
    tokenizer: Any = SimpleNamespace(chat_template=template)
    messages, _ = with_tools(tokenizer, asked, None)
    text = render_jinja_template([messages], chat_template=template)[0][0]
    return text.partition("<|assistant|>")[2].removesuffix("<|end|>").removesuffix("<|END_OF_TURN|>")
