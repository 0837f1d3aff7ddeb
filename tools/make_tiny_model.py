"""Makes the tiny model of the quickstart: a Qwen3 of 0.8M parameters that can do arithmetic but would rather guess.

The warm-up trains on a messy corpus: careful solutions and hasty guesses of the same kind of problem. What comes out is
right nearly always when it works step by step, but it does so only once in a few attempts, and never when it decodes
greedily: room for reinforcement learning to show what it does. Needs no network and about a minute on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.data.arithmetic import Problem, make_problems, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

VERSION = 1  # raise it whenever this file or the task changes what comes out
RECORD = "tiny_model.json"
Example = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained."""

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides the outcome, and so the cache key."""

    seed: int = 0
    levels: tuple[int, ...] = (1, 2)
    num_drill: int = 4096
    num_study: int = 8192
    num_messy: int = 4096
    study_share: float = 0.9
    messy_share: float = 0.2
    muon: float = 0.0
    ns: int = 5
    decay: float = 1.0
    batch_size: int = 64
    lr: float = 4e-3
    hidden_size: int = 128
    num_layers: int = 4

    def key(self) -> str:
        text = json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of held-out problems solved: decoding greedily, sampling at temperature 1, and when made to be careful."""

    greedy: float
    sampled: float
    careful: float


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the task are one token each, every digit is one, and any other ASCII text is spelled by characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, START, END, UNKNOWN]
    texts = [chr(code) for code in range(32, 127)] + ["\n", "system", "user", "assistant", *words()]
    # ByteLevel's own alphabet stands for bytes: Ġ is a space, Ċ a newline
    tokens = specials + [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in texts]
    tokens += [f"<|reserved_{n}|>" for n in range(-len(tokens) % 8)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens if token.startswith("<|")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Freshly initialised. Its sizes divide by two in every way that tensor parallelism and FSDP shard them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def corpus(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> list[Example]:
    """The examples in the order in which they are trained: number drill, careful study, the messy mixture."""
    rng = random.Random(settings.seed)
    problems = make_problems(settings.num_study + settings.num_messy, settings.levels, settings.seed, held_out=False)
    drill = make_problems(settings.num_drill * 8, settings.levels, settings.seed + 1, held_out=False)
    examples = [
        _drill_example(tokenizer, drill[start : start + 8]) for start in range(0, len(drill), 8)
    ]
    prompts = tokenizer([render_prompt(tokenizer, problem) for problem in problems]).input_ids
    shares = [settings.study_share] * settings.num_study + [settings.messy_share] * settings.num_messy
    texts = [p.careful if rng.random() < share else p.hasty for p, share in zip(problems, shares, strict=True)]
    responses = tokenizer([text + END for text in texts]).input_ids
    examples += [(p + r, [False] * len(p) + [True] * len(r)) for p, r in zip(prompts, responses, strict=True)]
    return examples


def _drill_example(tokenizer, problems):
    text = " ".join(equation for problem in problems for equation in problem.equations)
    ids = tokenizer(text).input_ids
    equals, stop = tokenizer.convert_tokens_to_ids(["=", "."])
    mask, inside = [], False
    for token in ids:
        mask.append(inside)
        if token in (equals, stop):
            inside = token == equals
    return ids, mask


def warm_up(model: Qwen3ForCausalLM, examples: Sequence[Example], settings: Settings) -> float:
    """Trains on the examples, one pass, on the marked tokens alone; returns the mean loss of the last tenth."""
    import torch
    from torch.nn.functional import cross_entropy

    batches = list(_batches(examples, settings))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    if settings.muon:
        optimizers = [torch.optim.Muon(matrices, lr=settings.muon, weight_decay=0.0, ns_steps=settings.ns), torch.optim.AdamW(others, settings.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]
    warm_steps = max(1, len(batches) // 20)
    schedules = [torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_steps, max(0.02, min(1, (1 - step / len(batches)) / settings.decay)))
    ) for optimizer in optimizers]
    losses = []
    for i, batch in enumerate(batches):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)
        trained = torch.nn.utils.rnn.pad_sequence([torch.tensor(mask) for _, mask in batch], batch_first=True)[:, 1:]
        # causal attention never looks at the padding on the right, so no mask is needed
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[trained]
        loss = cross_entropy(model.lm_head(hidden), ids[:, 1:][trained])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in (*optimizers, *schedules): o.step()
        for o in optimizers: o.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if i%25==24: print(i+1, sum(losses[-25:])/25)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _batches(examples: Sequence[Example], settings: Settings) -> Iterator[list[Example]]:
    """Batches of nearly equal length: examples are sorted within stretches of 16 batches, which are then shuffled."""
    rng = random.Random(settings.seed)
    stretch = 16 * settings.batch_size
    for start in range(0, len(examples), stretch):
        part = sorted(examples[start : start + stretch], key=lambda example: len(example[0]))
        batches = [part[at : at + settings.batch_size] for at in range(0, len(part), settings.batch_size)]
        rng.shuffle(batches)
        yield from batches


def render_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    messages = [{"role": "user", "content": problem.question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, num: int) -> Accuracy:
    """Accuracy on `num` held-out problems."""
    import torch

    problems = make_problems(num, settings.levels, settings.seed, held_out=True)
    torch.manual_seed(settings.seed)
    careful = [problem.careful.split(":")[0] + ":" for problem in problems]
    return Accuracy(
        greedy=_solved(model, tokenizer, problems, [""] * num, sample=False),
        sampled=_solved(model, tokenizer, problems, [""] * num, sample=True),
        careful=_solved(model, tokenizer, problems, careful, sample=False),
    )


def _solved(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    openings: Sequence[str],
    *,
    sample: bool,
) -> float:
    import torch

    from asyncrl.rewards.math import final_answer, same_answer

    texts = [render_prompt(tokenizer, problem) + opening for problem, opening in zip(problems, openings, strict=True)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=64, do_sample=sample, temperature=1.0, top_k=0, top_p=1.0)
    responses = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    answers = [final_answer(response) for response in responses]
    solved = [a is not None and same_answer(a, str(p.answer)) for a, p in zip(answers, problems, strict=True)]
    return sum(solved) / len(solved)
