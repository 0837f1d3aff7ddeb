"""A tiny Qwen3 that says by heart what agents' harnesses need, whatever stands before: thoughts, a call of the harness'
own tool, then an answer, of which the right one and a wrong one are equally likely. `python tools/make_tool_task.py
--task harness` writes it.

The next token follows from the last one alone (attention and MLP add nothing), so prompts of any length work; which
reply begins is decided by the chat template, from the tools. What reinforcement learning finds is the right answer.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLS = {
    "calculator": {"expression": "2+2"},
    "bash": {"command": "echo $((2+2))"},  # mini-swe-agent
    "Bash": {"command": "echo $((2+2))", "description": "Adds"},  # Claude Code
    "exec_command": {"cmd": "echo $((2+2))"},  # Codex
}
END, HIDDEN, SHARPNESS = "<|im_end|>", 256, 25.0
CHAT_TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- set last = messages[-1].content or '' %}
{%- set known = (tools or []) | map(attribute='function.name') | select('in', CALLS) | list %}
{%- if 'returncode' in last %}{{- '<|submit|>' }}
{%- elif 'Observation' in last %}{{- '<|final|>' }}
{%- elif messages | selectattr('role', 'equalto', 'tool') | list %}{{- '<|answer|>' }}
{%- elif known %}{{- '<|' + known[0] + '|>' }}
{%- elif '<code>' in (messages[0].content or '') %}{{- '<|code|>' }}
{%- else %}{{- '<|answer|>' }}{%- endif %}{%- endif %}"""


def chains() -> dict[str, list[list[str]]]:
    """First token of a reply -> the words that follow, of which some are to be chosen from."""
    called = {name: [[_call(name, arguments)]] for name, arguments in CALLS.items()}
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo"
    answers = [f"Answer: {number}" for number in (4, 5)]
    called["submit"] = [[_call("bash", {"command": f"{submit} {answer}"}) for answer in answers]]
    called["code"] = [["<code>\nprint(2+2)"], ["\n</code>"]]
    called["final"] = [[f'<code>\nfinal_answer("{answer}")' for answer in answers], ["\n</code>"]]
    called["answer"] = [answers]
    return {
        f"<|{name}|>": [[f"<think>\nI know {name}"], [f" and use {name}.\n</think>\n\n"], *said]
        for name, said in called.items()
    }


def _call(name: str, arguments: dict[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def save(directory: Path, seed: int) -> None:
    """Writes model and tokenizer."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    # A vocabulary of subwords, since the prompts of some harnesses have 75,000 characters.
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    raw.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    says = chains()
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", END, *says)])
    words = dict.fromkeys(word for words in says.values() for choice in words for word in choice)
    raw.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    template = f"{{%- set CALLS = {[*CALLS]} %}}" + CHAT_TEMPLATE
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, chat_template=template)
    ids = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        spoken = torch.nn.functional.normalize(torch.randn(len(tokenizer), HIDDEN), dim=1)
        model.model.embed_tokens.weight.copy_(spoken)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for first, said in says.items():
            steps = [[first], *said, [END]]
            for before, after in pairwise(steps):
                for word in after:
                    rows = torch.stack([spoken[ids[known]] for known in before])
                    model.lm_head.weight[ids[word]] += SHARPNESS / HIDDEN**0.5 * rows.sum(0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
