"""Makes the tiny model of the quickstart: a Qwen3 that can do arithmetic but would rather guess.

The warm-up drills number facts, studies careful solutions, and ends on a messy mixture of careful solutions and hasty
guesses. What comes out solves a problem nearly always when it writes down its steps, but it seldom does so when it
samples and never when it decodes greedily: room for reinforcement learning to show what it does. No network, about a
minute on two cores; a second call with the same settings returns at once.

Two other models of the same size and tokenizer stand beside it. `--role teacher` ends on careful solutions, and has
nothing left to learn: a teacher for on-policy distillation. `--role judge` is shown a problem and a solution, careful
or hasty, and says whether it was worked out: "yes" or "no".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.data.model_files import check_model
from asyncrl.errors import ConfigError, explain
from tools import arithmetic
from tools.arithmetic import Problem, make_equations, make_problems, words

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

RECORD = "tiny_model.json"
MAX_TOKENS = 1024
JUDGE_PROMPT = "{prompt}\n{response}\nyes or no?"
MAX_THREADS = 4  # the matrices are too small to feed more
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides the outcome."""

    role: Literal["student", "teacher", "judge"] = "student"
    seed: int = 0
    levels: tuple[int, ...] = (1, 2)
    num_drill: int = 6144
    """Sequences of bare equations: the densest way to learn number facts."""
    num_study: int = 10240
    """Problems that are mostly solved with care."""
    num_messy: int = 2048
    """Problems of the final mixture."""
    num_judged: int = 2048
    """Problems whose solutions a judge sees."""
    study_shares: tuple[float, float] = (0.95, 0.7)
    """Careful share while studying: of problems that begin with a product, which tempt less to guess, and of others."""
    messy_shares: tuple[float, float] = (0.7, 0.12)
    """The same in the final mixture: about how often the model will be careful when it samples."""
    batch_size: int = 16
    matrix_lr: float = 0.02
    """Peak learning rate of Muon, for the matrices of the layers."""
    other_lr: float = 4e-3
    """Peak learning rate of AdamW, for the embedding and the norms."""
    hidden_size: int = 128
    num_layers: int = 2

    def key(self) -> str:
        """Changes with every setting and with the code that makes the model."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for file in (__file__, arithmetic.__file__):
            digest.update(Path(file).read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence: `token_ids`, and which of them are `trained` (the same length)."""

    token_ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of held-out problems solved: decoding greedily, sampling at temperature 1, and when made to be careful. Of
    a judge the share of careful and hasty solutions that it tells apart, three times."""

    greedy: float
    sampled: float
    careful: float


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the task are one token each, so is every digit; other ASCII text is spelled, the rest is unknown."""
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
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Freshly initialised. Its sizes divide by two in every way that tensor parallelism and FSDP shard them."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(settings.seed)
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[vocabulary[END]], pad_token_id=vocabulary[PAD])
    return model


def corpus(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> list[Example]:
    """The examples in the order in which they are trained, each seen once."""
    if settings.role == "judge":
        return [example for problem in _judged(settings) for example in _judgements(tokenizer, problem)]
    rng = random.Random(settings.seed)
    problems = make_problems(settings.num_study + settings.num_messy, settings.levels, settings.seed, held_out=False)
    prompts = tokenizer([render_prompt(tokenizer, problem) for problem in problems]).input_ids
    texts = []
    for number, problem in enumerate(problems):
        shares = settings.study_shares if number < settings.num_study else settings.messy_shares
        careful = rng.random() < shares["*" not in problem.equations[0]]
        texts.append(problem.careful if careful else problem.hasty)
    responses = tokenizer([text + END for text in texts]).input_ids
    solved = [
        Example(prompt + response, [False] * len(prompt) + [True] * len(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return [_drill_example(tokenizer, rng) for _ in range(settings.num_drill)] + solved


def _judged(settings: Settings) -> list[Problem]:
    return make_problems(settings.num_judged, settings.levels, settings.seed, held_out=False)


def _judgements(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> Iterator[Example]:
    """Both solutions of the problem with the answer of a judge, which alone is trained."""
    for solution, answer in ((problem.careful, "yes"), (problem.hasty, "no")):
        prompt = tokenizer(question_for_judge(tokenizer, problem.question, solution)).input_ids
        ids = tokenizer(answer + END).input_ids
        yield Example(prompt + ids, [False] * len(prompt) + [True] * len(ids))


def question_for_judge(tokenizer: PreTrainedTokenizerFast, question: str, solution: str) -> str:
    """What a judge reads, as recipes/quickstart_judge.yaml asks it."""
    messages = [{"role": "user", "content": JUDGE_PROMPT.format(prompt=question, response=solution)}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _drill_example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    """Equations in a row, trained on what follows each `=` up to its full stop."""
    ids = tokenizer(" ".join(make_equations(rng, 8))).input_ids
    equals, stop = (tokenizer.convert_tokens_to_ids(sign) for sign in "=.")
    trained, after_equals = [], False
    for token in ids:
        trained.append(after_equals)
        after_equals = token == equals or (after_equals and token != stop)
    return Example(ids, trained)


def render_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    messages = [{"role": "user", "content": problem.question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def warm_up(model: Qwen3ForCausalLM, examples: Sequence[Example], settings: Settings) -> None:
    """Trains `model` in place on the examples, one pass in their order."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_
    from torch.nn.utils.rnn import pad_sequence

    batches = list(_batches(examples, settings))
    optimizers = _optimizers(model, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, len(batches)))
        for optimizer in optimizers
    ]
    started_s, losses = time.monotonic(), []
    for number, batch in enumerate(batches, start=1):
        ids = pad_sequence([torch.tensor(example.token_ids) for example in batch], batch_first=True)
        trained = pad_sequence([torch.tensor(example.trained) for example in batch], batch_first=True)[:, 1:]
        # causal attention never looks at the padding on the right, so no mask is needed
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[trained]
        loss = cross_entropy(model.lm_head(hidden), ids[:, 1:][trained])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if number % 128 == 0 or number == len(batches):
            mean = sum(losses[-128:]) / len(losses[-128:])
            print(f"  step {number}/{len(batches)}  loss {mean:.3f}  {time.monotonic() - started_s:.0f} s", flush=True)


def _optimizers(model: Qwen3ForCausalLM, settings: Settings) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers: in the same steps, AdamW alone learns next to none of the number facts.

    It is gradient descent along orthogonalised momentum, like torch.optim.Muon, but in float32 and with matrices of
    one shape together: a CPU without instructions for bfloat16 takes forty times as long for these small products.
    """
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": [p for p in matrices if p.shape == (rows, columns)], "lr": _muon_lr(settings, rows, columns)}
        for rows, columns in dict.fromkeys(p.shape for p in matrices)
    ]
    muon = torch.optim.SGD(groups)
    muon.register_step_pre_hook(lambda optimizer, *_: _orthogonalize_gradients(optimizer))
    return muon, torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def _muon_lr(settings: Settings, rows: int, columns: int) -> float:
    return settings.matrix_lr * max(1.0, rows / columns) ** 0.5


def _orthogonalize_gradients(optimizer: torch.optim.Optimizer, momentum: float = 0.95) -> None:
    """Replaces the gradients of each group, matrices of one shape, by their orthogonalised Nesterov momentum."""
    import torch

    for group in optimizer.param_groups:
        gradients = torch.stack([p.grad for p in group["params"]])
        state = optimizer.state[group["params"][0]]
        averages = state.setdefault("averages", torch.zeros_like(gradients)).lerp_(gradients, 1 - momentum)
        for p, direction in zip(group["params"], orthogonalize(gradients.lerp(averages, momentum)), strict=True):
            p.grad = direction


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly: singular values end between 0.7 and 1.2.

    matrices: shape (number, rows, columns). Five steps of the quintic Newton-Schulz iteration with the coefficients
    of Muon (Jordan et al., 2024).
    """
    import torch

    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def _lr_share(step: int, num_steps: int) -> float:
    """Of the peak learning rate: a rise over the first twentieth, then a straight line down to 5%."""
    return min((step + 1) * 20 / num_steps, max(0.05, 1 - step / num_steps))


def _batches(examples: Sequence[Example], settings: Settings) -> Iterator[list[Example]]:
    """Batches of nearly equal length: examples are sorted within stretches of 32 batches, which are then shuffled."""
    rng = random.Random(settings.seed)
    size = settings.batch_size
    for start in range(0, len(examples), 32 * size):
        stretch = sorted(examples[start : start + 32 * size], key=lambda example: len(example.token_ids))
        batches = [stretch[at : at + size] for at in range(0, len(stretch), size)]
        rng.shuffle(batches)
        yield from batches


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, num: int) -> Accuracy:
    """Accuracy on `num` held-out problems."""
    import torch

    problems = make_problems(num, settings.levels, settings.seed, held_out=True)
    if settings.role == "judge":
        told = _told_apart(model, tokenizer, problems)
        return Accuracy(greedy=told, sampled=told, careful=told)
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
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
        output = model.generate(**inputs, max_new_tokens=64, **sampling)
    responses = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    answers = [final_answer(response) for response in responses]
    solved = [a is not None and same_answer(a, str(p.answer)) for a, p in zip(answers, problems, strict=True)]
    return sum(solved) / len(solved)


def _told_apart(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> float:
    """Share of careful and hasty solutions of which a judge says what they are."""
    import torch

    right = 0
    for problem in problems:
        for example in _judgements(tokenizer, problem):
            at = example.trained.index(True)
            with torch.no_grad():
                logits = model(torch.tensor([example.token_ids[:at]])).logits[0, -1]
            right += int(logits.argmax()) == example.token_ids[at]
    return right / (2 * len(problems))


def make(out: Path, settings: Settings) -> Accuracy:
    """Builds, trains, measures and saves the model; `out` appears, or is replaced, only when all of it is done."""
    # threads that spin while they wait cost 10 times and more on shared cores; must be said before torch is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    examples = corpus(tokenizer, settings)
    print(f"warming up {sum(p.numel() for p in model.parameters())} parameters on {len(examples)} examples", flush=True)
    warm_up(model.train(), examples, settings)
    accuracy = measure(model.eval(), tokenizer, settings, num=256)
    record = {"key": settings.key(), "settings": asdict(settings), "accuracy": asdict(accuracy)}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return accuracy


def cached(out: Path, settings: Settings) -> Accuracy | None:
    """What the model in `out` reached when these settings made it; None when there is none or others did.

    Raises ConfigError: `out` holds something that this tool did not write, and must not replace.
    """
    file = out / RECORD
    if out.exists() and not file.is_file():
        found = f"it exists and has no {RECORD}: it is not a tiny model"
        raise ConfigError(explain(f"--out {out}", found, "name another directory, or remove this one yourself"))
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    if record["key"] != settings.key():
        return None
    try:
        check_model(str(out.resolve()))
    except ConfigError:
        return None  # a file was lost: make the model again
    return Accuracy(**record["accuracy"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 when the options cannot be used."""
    options = _parse(arguments)
    settings = _scaled(_of_role(options.role, options.seed), options.share)
    try:
        accuracy = cached(options.out, settings)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    started_s = time.monotonic()
    if accuracy is not None and not options.force:
        print(f"{options.out} is up to date")
    else:
        accuracy = make(options.out, settings)
        print(f"wrote {options.out} in {time.monotonic() - started_s:.0f} s")
    print(f"held-out accuracy: greedy {accuracy.greedy:.3f}, sampled {accuracy.sampled:.3f}, ", end="")
    print(f"when made to be careful {accuracy.careful:.3f}")
    return 0


def _of_role(role: Literal["student", "teacher", "judge"], seed: int) -> Settings:
    settings = Settings(role=role, seed=seed)
    return replace(settings, messy_shares=(0.99, 0.99)) if role == "teacher" else settings


def _scaled(settings: Settings, share: float) -> Settings:
    names = ("num_drill", "num_study", "num_messy", "num_judged")
    counts = {name: max(1, round(share * getattr(settings, name))) for name in names}
    return replace(settings, **counts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-qwen3"), help="directory to write")
    parser.add_argument(
        "--role", choices=["student", "teacher", "judge"], default="student", help="what the model is to be"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initialisation and the corpus")
    parser.add_argument("--share", type=_share, default=1.0, help="of the warm-up to run; less makes a worse model")
    parser.add_argument("--force", action="store_true", help="make it again even when it is up to date")
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
