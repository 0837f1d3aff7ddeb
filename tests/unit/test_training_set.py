"""Training prompts: what is left out and counted, the mapped file that holds them, the bound that spares tokenizing."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.data import DataConfig
from asyncrl.config.model import ModelConfig
from asyncrl.data import row_table
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompt_stream import build_stream
from asyncrl.data.row_table import BATCH_ROWS, RowWriter
from asyncrl.data.rows import ChatMessage, PromptRow, to_record
from asyncrl.data.tokenizer import PromptRenderer, render_rows
from asyncrl.data.training_set import TrainingSet, training_prompts
from asyncrl.errors import DataError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"
MODEL = ModelConfig(path="none")


def row(content: str, truth: str = "1", origin: str = "t:1", **extra: str) -> PromptRow:
    return PromptRow((ChatMessage("user", content),), truth, "test", tuple(extra.items()), origin)


def trained(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of the ways that real ones work."""
    corpus = ["What is the sum of two numbers, 12 and 34?", "ﬃ ﷺ é ñ 漢字 😀 mixed", "a b c d e f g"] * 4
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "sentencepiece":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Metaspace()])
        trainer = trainers.UnigramTrainer(
            vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


KINDS = ("byte_level", "sentencepiece", "unigram")
RENDERERS = {kind: PromptRenderer(trained(kind), MODEL) for kind in KINDS}
LETTERS = st.one_of(st.sampled_from("ab 12ﷺﬃé漢😀\n\t"), st.characters(codec="utf-8"))
TEXTS = st.lists(st.tuples(LETTERS, st.integers(1, 40)), min_size=1, max_size=6).map(
    lambda runs: "".join(letter * times for letter, times in runs)
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), TEXTS.filter(str.strip), st.integers(1, 400))
def test_a_prompt_that_is_not_tokenized_is_short_enough(kind: str, content: str, limit: int) -> None:
    """Also where a normaliser makes eleven bytes of one, or a pre-tokenizer puts a prefix before every piece."""
    renderer = RENDERERS[kind]
    asked = row(content)
    count = len(renderer.prompt_ids(asked))
    found = renderer.tokens_over(asked, renderer.text(asked), limit)
    assert limit < found <= count if count > limit else found is None


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_what_the_chat_template_tokenizes_to(kind: str) -> None:
    tokenizer, content = trained(kind), "What is 12 and ﷺ 漢字?"
    messages = [{"role": "user", "content": content}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert PromptRenderer(tokenizer, MODEL).prompt_ids(row(content)).tolist() == expected


def test_added_tokens_of_one_byte_leave_no_bound() -> None:
    """Each of them may be followed by a prefix: more tokens than bytes."""
    tokenizer = trained("sentencepiece")
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    renderer = PromptRenderer(tokenizer, MODEL)
    asked = row("#q" * 200)
    text, count = renderer.text(asked), len(renderer.prompt_ids(asked))
    assert count > len(text.encode())
    assert renderer.tokens_over(asked, text, count - 1) == count
    assert renderer.tokens_over(asked, text, count) is None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_huge_prompt_is_too_long_without_being_tokenized(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = RENDERERS[kind]
    asked = row("ab 12" * 100_000)
    text = renderer.text(asked)
    monkeypatch.setattr(renderer, "_tokenizer", None)
    assert 1000 < renderer.tokens_over(asked, text, 1000) < len(text)


def write(path: Path, rows: Sequence[PromptRow]) -> str:
    path.write_text("".join(json.dumps(to_record(r)) + "\n" for r in rows))
    return str(path)


def prompts_of(data: DataConfig) -> TrainingSet:
    found = training_prompts(data, RENDERERS["byte_level"], lambda source: True)
    assert found is not None
    return found


CONTENTS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 40), st.sampled_from("12")), min_size=1)


@settings(max_examples=40, deadline=None)
@given(CONTENTS, st.integers(20, 60), st.booleans())
def test_rows_counts_and_ordinals_are_those_of_rendering_everything(
    tmp_path_factory, contents, limit, distinct
) -> None:
    """The reference reads, renders and compares every row."""
    rows = [row(f"{letter} " * times, truth) for letter, times, truth in contents]
    file = write(tmp_path_factory.mktemp("data") / "t.jsonl", rows)
    kept = list({(r.messages, r.ground_truth): r for r in reversed(load_rows(file))}.values())[::-1]
    expected = sorted(kept, key=lambda r: int(r.origin.split(":")[-1])) if distinct else load_rows(file)
    renderer, data = (
        RENDERERS["byte_level"],
        DataConfig(train=file, max_prompt_tokens=limit, on_long_prompt="drop", drop_duplicates=distinct),
    )
    try:
        reference = render_rows(expected, renderer, limit, "drop")
    except DataError as error:
        with pytest.raises(DataError, match=str(error).splitlines()[1]):
            prompts_of(data)
        return
    found = prompts_of(data)
    assert tuple(found.rows) == reference.rows
    assert [renderer.prompt_ids(r).tolist() for r in found.rows] == [ids.tolist() for ids in reference.prompt_ids]
    assert (found.num_dropped, found.num_duplicates) == (reference.num_dropped, len(rows) - len(expected))
    stream = build_stream(found, 3, True)
    assert {stream.row_index(o) for o in range(len(found.rows))} == set(range(len(found.rows)))


def test_alike_is_what_is_asked_and_judged_alike(tmp_path: Path) -> None:
    """The number of a row makes none of it another task; what rewards read does."""
    other = PromptRow((ChatMessage("system", "b"), ChatMessage("user", "a")), "1", "test", (("index", "6"),), "t:1")
    rows = [
        row("a", index="1"),
        row("b", index="2"),
        row("a", index="3"),
        row("a", "2", index="4"),
        row("a", index="5", tests="x"),
        other,
        replace(row("a", index="7"), data_source="other"),
        row("b", index="8"),
    ]
    data = DataConfig(train=write(tmp_path / "t.jsonl", rows))
    found = prompts_of(data)
    assert [dict(r.extra)["index"] for r in found.rows] == ["1", "2", "4", "5", "6", "7"]
    assert found.num_duplicates == 2
    assert len(prompts_of(replace(data, drop_duplicates=False)).rows) == 8


def test_the_digest_changes_with_all_that_a_task_is(tmp_path: Path) -> None:
    def digest(*rows: PromptRow, **changes: object) -> str:
        data = DataConfig(train=write(tmp_path / "t.jsonl", rows), **changes)  # pyright: ignore[reportArgumentType]
        return prompts_of(data).digest

    tested = row("a", tests="assert f() == 1", level="2")
    others = [
        row("a"),
        replace(tested, ground_truth="2"),
        replace(tested, messages=row("b").messages),
        replace(tested, extra=(("tests", "assert f() == 2"), ("level", "2"))),
    ]
    assert digest(tested) == digest(replace(tested, extra=tested.extra[::-1])) == digest(tested, tested)
    assert len({digest(tested), *map(digest, others), digest(tested, row("a")), digest(row("a"), tested)}) == 7
    assert digest(tested, tested, drop_duplicates=False) != digest(tested) != digest(tested, system_prompt="b")
    data = DataConfig(train=write(tmp_path / "t.jsonl", [tested]))
    by_tokenizer = {training_prompts(data, renderer, lambda source: True).digest for renderer in RENDERERS.values()}
    assert len(by_tokenizer) == 3


def test_a_long_prompt_is_an_error_before_the_run_wherever_it_stands(tmp_path: Path) -> None:
    rows = [row("a") for _ in range(3)] + [row("b " * 500)]
    data = DataConfig(train=write(tmp_path / "t.jsonl", rows), max_prompt_tokens=90)
    with pytest.raises(DataError, match=rf"the prompt of {tmp_path}/t\.jsonl:4\nfound: \d+ tokens"):
        prompts_of(data)


def writer_of(*rows: PromptRow) -> RowWriter:
    writer = RowWriter()
    for one in rows:
        writer.add(one)
    return writer


@pytest.mark.parametrize("count", [1, BATCH_ROWS, 2 * BATCH_ROWS + 3])
def test_a_table_gives_its_rows_back_one_by_one_and_in_order(tmp_path: Path, count: int) -> None:
    rows = [row(f"{i} 漢", str(i), f"t:{i}", **{"": "", "k": f"{i}"} if i % 2 else {}) for i in range(count)]
    table = writer_of(*rows).table()
    assert list(table) == rows
    places = sorted({0, count // 2, count - 1, min(BATCH_ROWS, count - 1)})
    assert [table[i] for i in places] == [rows[i] for i in places]
    assert table[-1] == rows[-1]
    assert table[1:3] == rows[1:3]
    for index in (count, -count - 1):
        with pytest.raises(IndexError):
            table[index]
    other = pickle.loads(pickle.dumps(table))
    assert other[count - 1] == rows[-1]
    assert len(pickle.dumps(table)) < 500, "the path, not the rows"


def test_the_file_of_a_table_goes_with_it_unless_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    writer = writer_of(row("a"))
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    assert not list(tmp_path.iterdir()), "a writer that was given up"
    table = writer_of(row("a")).table()
    assert table[0] == row("a")
    del table
    assert not list(tmp_path.iterdir())
    table = writer_of(row("a")).table()
    assert table[0] == row("a")
    table.keep(tmp_path / "prompts.arrow")
    assert table[0] == pickle.loads(pickle.dumps(table))[0] == row("a")
    del table
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.arrow"]


def test_a_rollouter_has_of_a_large_set_what_it_has_asked(tmp_path: Path) -> None:
    """Arrow's own count of the memory that it allocated: mapped bytes are none of it."""
    import pyarrow

    writer = writer_of(*(row(f"{i} " + "x" * 200) for i in range(20 * row_table.BATCH_ROWS)))
    table = pickle.loads(pickle.dumps(writer_table := writer.table()))
    before = pyarrow.total_allocated_bytes()
    assert table[12_345].messages[0].content.startswith("12345 ")
    assert pyarrow.total_allocated_bytes() - before < 1_000_000 < writer_table.path.stat().st_size
