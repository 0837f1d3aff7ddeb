import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SamplingConfig
from asyncrl.data.chat import Chat
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, render_rows, stop_texts, stop_token_ids
from asyncrl.errors import ConfigError, DataError

VOCABULARY = ["[UNK]", "<end>", "<user>", "<assistant>", "<think>", "a", "b", "c", "STOP"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only user turns') }}{% endif %}"
    "<user> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined %} {{ '<think>' if enable_thinking else 'c' }}{% endif %}"
)


def save_tokenizer(directory: Path, template: str | None = TEMPLATE, eos: str | None = "<end>") -> ModelConfig:
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token) for token in VOCABULARY[:5]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, unk_token="[UNK]")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return ModelConfig(path=str(directory))


def renderer_of(model: ModelConfig) -> PromptRenderer:
    return PromptRenderer(load_tokenizer(model), model)


def row(content: str, role: str = "user") -> PromptRow:
    return PromptRow((ChatMessage(role, content),), "1", "test", (), "train.jsonl:4")


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def test_a_prompt_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    prompt = renderer_of(save_tokenizer(tmp_path)).prompt_ids(row("a b"))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == ids("<user>", "a", "b", "<end>", "<assistant>")


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_is_passed_only_when_set_to_every_turn(tmp_path: Path, switch: str) -> None:
    template = TEMPLATE.replace("m.role != 'user'", "false").replace("enable_thinking", switch)
    save_tokenizer(tmp_path, template)
    for flag, end in ((None, "<assistant>"), (False, "c"), (True, "<think>")):
        model = ModelConfig(path=str(tmp_path), enable_thinking=flag)
        chat, asked = Chat(load_tokenizer(model), model), [{"role": "user", "content": "b"}]
        prompts = renderer_of(model).prompt_ids(row("a")), chat.prompt(asked)
        assert [found[-1] for found in (*prompts, chat.next_turn(prompts[0], asked))] == ids(end) * 3


def test_a_template_file_replaces_that_of_the_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }} c")
    model = ModelConfig(path=str(tmp_path), chat_template=str(tmp_path / "mine.jinja"))
    assert renderer_of(model).prompt_ids(row("a")).tolist() == ids("a", "c")


def test_every_renderer_writes_the_date_of_the_recipe(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    model = replace(save_tokenizer(tmp_path, template=template), date="2020-02-03")
    assert renderer_of(model).text(row("a")) == "03 Feb 2020 a"
    chat = Chat(load_tokenizer(model), model)
    assert chat._template.render([{"role": "user", "content": "a"}], asked="it") == "03 Feb 2020 a"
    for wrong in ("today", "2026-02-30", "20260203"):
        with pytest.raises(ConfigError, match=rf"model\.date={wrong}"):
            replace(model, date=wrong)


def test_what_cannot_be_loaded_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer of the model "):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    save_tokenizer(tmp_path, template=None)
    with pytest.raises(ConfigError, match=r"(?s)the chat template of.*set model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"model\.chat_template=.*missing\.jinja"):
        load_tokenizer(ModelConfig(path=str(tmp_path), chat_template=str(tmp_path / "missing.jinja")))


def test_a_row_that_the_template_refuses_or_that_cannot_be_tokenized_is_named(tmp_path: Path) -> None:
    renderer = renderer_of(save_tokenizer(tmp_path))
    with pytest.raises(DataError, match=r"(?s)train\.jsonl:4.*only user turns"):
        renderer.prompt_ids(row("a", role="system"))
    with pytest.raises(DataError, match=r"the prompt of train\.jsonl:4"):
        renderer.prompt_ids(row("a \ud83d"))


def test_long_prompts_stop_the_run_or_are_dropped_and_counted(tmp_path: Path) -> None:
    renderer = renderer_of(save_tokenizer(tmp_path))
    rows = [row("a"), row("a b c"), row("b")]
    rendered = render_rows(rows, renderer, max_prompt_tokens=4, on_long_prompt="drop")
    assert rendered.rows == (rows[0], rows[2])
    assert [prompt.tolist()[1] for prompt in rendered.prompt_ids] == ids("a", "b")
    assert rendered.num_dropped == 1
    assert render_rows(rows, renderer, max_prompt_tokens=6, on_long_prompt="error").num_dropped == 0
    with pytest.raises(DataError, match=r"train\.jsonl:4\nfound: 6 tokens, data\.max_prompt_tokens=5"):
        render_rows(rows, renderer, max_prompt_tokens=5, on_long_prompt="error")
    with pytest.raises(DataError, match="every one of 3 prompts"):
        render_rows(rows, renderer, max_prompt_tokens=3, on_long_prompt="drop")


@pytest.mark.parametrize(("eos", "expected"), [(7, [1, 7]), ([6, 5], [1, 5, 6]), (None, [1])])
def test_stop_ids_come_from_tokenizer_and_generation_config(tmp_path: Path, eos: object, expected: list[int]) -> None:
    model = save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(model)
    assert stop_token_ids(tokenizer, model, []) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert stop_token_ids(tokenizer, model, []) == tuple(expected)


def test_a_stop_text_of_one_token_ends_a_response_in_the_engine_and_others_are_looked_for(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(model)
    assert stop_token_ids(tokenizer, model, ["STOP", "a b"]) == (1, 8)
    assert stop_token_ids(tokenizer, model, ["no such word"]) == (1,), "the token of unknown words ends nothing"
    special = tokenizer.convert_ids_to_tokens(1)
    found = stop_texts(tokenizer, ["STOP", special, "a b", "STOP"])
    assert found.texts == ("STOP", "a b")
    assert stop_texts(tokenizer, [special]) is None
    assert stop_texts(tokenizer, [special], of_request=True).texts == (special,)


@pytest.mark.parametrize("text", ["", "a\ufffd", "\ud800"])
def test_a_stop_text_that_no_response_contains_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop="):
        SamplingConfig(stop=["END", text])


def test_a_model_that_never_stops_is_refused(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path, eos=None)
    tokenizer = load_tokenizer(model)
    with pytest.raises(ConfigError, match=r"set rollout\.sampling\.stop"):
        stop_token_ids(tokenizer, model, [])
    assert stop_token_ids(tokenizer, model, ["STOP"]) == (8,)
