"""Mixtures and curricula: pure functions from an ordinal to a row."""

import json
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.data import CurriculumConfig, DataConfig, SourceConfig
from asyncrl.config.paths import is_generator
from asyncrl.data.dataset import read_rows
from asyncrl.data.prompt_stream import MixedStream, PromptStream, build_stream
from asyncrl.data.row_table import SourceRows
from asyncrl.data.training_set import training_prompts
from asyncrl.errors import ConfigError, DataError

RENDERER = SimpleNamespace(
    text=lambda row: row.messages[0].content,
    tokens_over=lambda row, text, limit: len(text) if len(text) > limit else None,
    prompt_ids=lambda row: np.frombuffer(row.messages[0].content.encode(), np.uint8),
    identity=lambda: b"bytes",
)


def mixed(weights: list[float], sizes: list[int], seed: int = 3) -> MixedStream:
    sources, start = [], 0
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        sources.append(SourceRows(f"s{number}", weight, start, start + size))
        start += size
    return MixedStream(sources, [PromptStream(size, seed + number) for number, size in enumerate(sizes)])


def write(path: Path, *ease: float | None) -> str:
    rows = [
        {"prompt": f"{path.stem} {n}", "answer": n} | ({} if e is None else {"pass_rate": e})
        for n, e in enumerate(ease)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.05, 20), min_size=1, max_size=4),
    st.integers(0, 30_000),
    st.integers(1, 2_000),
)
def test_every_window_has_the_shares_of_the_weights(weights, start, length) -> None:
    stream = mixed(weights, [7] * len(weights))
    counts = Counter(stream.source(ordinal)[0] for ordinal in range(start, start + length))
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(counts[number] - share * length) <= len(weights) + 2e-4 * length


def test_each_source_goes_through_its_own_epochs() -> None:
    stream = mixed([3, 1], [6, 5])
    rows = [stream.row_index(ordinal) for ordinal in range(4 * 60)]
    first, second = [r for r in rows if r < 6], [r for r in rows if r >= 6]
    assert (len(first), len(second)) == (180, 60)
    for of, size in ((first, 6), (second, 5)):
        assert all(len(set(of[i : i + size])) == size for i in range(0, len(of) - size + 1, size))
    assert first[:6] != first[6:12]
    assert [mixed([3, 1], [6, 5]).row_index(o) for o in (200, 3, 77)] == [rows[o] for o in (200, 3, 77)]
    with pytest.raises(ValueError, match="ordinal=-1"):
        stream.row_index(-1)


def test_a_plain_run_keeps_its_order(tmp_path: Path) -> None:
    data = DataConfig(train=write(tmp_path / "a.jsonl", *[None] * 9))
    prompts = training_prompts(data, RENDERER, lambda source: True)
    stream = build_stream(prompts, 5, True)
    assert [stream.row_index(o) for o in range(40)] == [PromptStream(9, 5).row_index(o) for o in range(40)]


def test_a_mixture_is_read_from_its_files(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", *[None] * 4), write(tmp_path / "two.jsonl", *[None] * 4)
    mixture = {"one": SourceConfig(path=one, weight=2.0), "two": SourceConfig(path=two)}
    data = DataConfig(mixture=mixture)
    prompts = training_prompts(data, RENDERER, lambda source: True)
    stream = build_stream(prompts, 0, True)
    names = [prompts.rows[stream.row_index(o)].messages[0].content.split()[0] for o in range(3000)]
    assert Counter(names) == {"one": 2000, "two": 1000}
    other = DataConfig(mixture=mixture | {"one": SourceConfig(path=one, weight=3.0)})
    assert training_prompts(other, RENDERER, lambda source: True).digest != prompts.digest
    assert training_prompts(data, RENDERER, lambda source: source != two) is None
    assert training_prompts(data, None, lambda source: True) is None


def test_a_curriculum_goes_from_easy_to_hard_and_leaves_out_the_rest(tmp_path: Path) -> None:
    ease = [0.0, 0.1, 0.9, 0.5, 1.0, 0.3, 0.7]
    curriculum = CurriculumConfig(key="pass_rate", epochs=2, jitter=0.0, min=0.05, max=0.95)
    data = DataConfig(train=write(tmp_path / "a.jsonl", *ease), curriculum=curriculum)
    prompts = training_prompts(data, RENDERER, lambda source: True)
    assert (len(prompts.rows), prompts.num_filtered) == (5, 2)
    stream = build_stream(prompts, 0, True)
    visited = [float(prompts.ease[stream.row_index(o)]) for o in range(15)]
    assert visited[:5] == visited[5:10] == [0.9, 0.7, 0.5, 0.3, 0.1]
    assert sorted(visited[10:]) == sorted(visited[:5])
    for change in ({"jitter": 0.5}, {"epochs": 3}, {"max": 0.6}):
        changed = replace(data, curriculum=replace(curriculum, **change))
        assert training_prompts(changed, RENDERER, lambda source: True).digest != prompts.digest


def test_jitter_changes_the_order_from_epoch_to_epoch_only_so_far() -> None:
    ease = np.linspace(0, 1, 200)
    curriculum = CurriculumConfig(key="k", epochs=3, jitter=0.1)
    stream = PromptStream(200, 1, ease=ease, curriculum=curriculum)
    epochs = [[stream.row_index(e * 200 + o) for o in range(200)] for e in range(4)]
    assert all(sorted(epoch) == list(range(200)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs[:3]:
        visited = ease[epoch]
        assert all(visited[i] + 0.2 >= visited[i:].max() for i in range(200))
    assert ease[epochs[3]][:20].min() < 0.5, "the fourth is shuffled"


@pytest.mark.parametrize(
    ("ease", "found"),
    [
        ((0.5, None), r"a\.jsonl:2\nfound: its extra_info has nothing"),
        ((0.5, "many"), r"a\.jsonl:2\nfound: 'many', no finite number"),
        ((2.0, 3.0), r"no row has pass_rate between 0 and 1"),
    ],
)
def test_rows_that_a_curriculum_cannot_use(tmp_path: Path, ease, found) -> None:
    data = DataConfig(train=write(tmp_path / "a.jsonl", *ease), curriculum=CurriculumConfig(key="pass_rate"))
    with pytest.raises(DataError, match=found):
        training_prompts(data, RENDERER, lambda source: True)


class Squares:
    """A generator of users: tells its seed and the index, and repeats some questions."""

    def __init__(self, seed: int, every: int = 0) -> None:
        self.seed, self.every = seed, every

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == 500:
            return {"prompt": {1, 2}}
        if self.every:
            return {"prompt": f"{self.seed % 7}: {index % self.every}", "answer": index}
        return {"prompt": f"{self.seed}: {index}", "answer": index}


class Forgets:
    """Its rows depend on what was asked before."""

    def __init__(self, seed: int) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> dict[str, object]:
        self.count += 1
        return {"prompt": f"{self.count}", "answer": "1"}


class HalfCharacter:
    def __init__(self, seed: int) -> None:
        pass

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"prompt": "half \ud800", "answer": "1"}


def short_list(seed: int) -> list[dict[str, object]]:
    return [{"prompt": f"{n}", "answer": "1"} for n in range(100)]


def takes_all(row) -> bool:
    return True


def drawn(options=None, seed=0, **changes):
    data = DataConfig(train=f"{__name__}:Squares", options=options or {}, **changes)
    return training_prompts(data, RENDERER, lambda source: True, seed)


def row_of(found, ordinal: int, is_taken=takes_all):
    return found.row(build_stream(found, 0, True).row_index(ordinal), is_taken)


def test_a_generator_gives_each_group_a_row_of_its_own() -> None:
    first, again, other = drawn(), pickle.loads(pickle.dumps(drawn())), drawn(seed=1)
    rows = [row_of(first, o) for o in range(300)]
    assert [row.truth() for row in rows] == list(range(300))
    assert rows == [row_of(again, o) for o in range(300)]
    assert rows[0].messages != row_of(other, 0).messages
    assert first.digest == again.digest != other.digest
    assert len(first.rows) == 0
    assert first.drawn == tuple(rows[:64])


def test_what_is_too_long_or_held_out_is_drawn_again() -> None:
    found = drawn({"every": 3})
    held_out = row_of(found, 0).messages
    others = {row_of(found, o, lambda row: row.messages != held_out).messages for o in range(60)}
    assert held_out not in others
    assert len(others) == 3
    with pytest.raises(DataError, match="none of 50 rows"):
        row_of(found, 0, lambda row: False)
    with pytest.raises(DataError, match=r"Squares.*\[500\]"):
        row_of(found, 500)
    with pytest.raises(DataError, match=r"Squares\(seed=\d+\)\[0\]"):
        drawn(max_prompt_tokens=3)
    with pytest.raises(DataError, match="none of 50 rows"):
        drawn(max_prompt_tokens=3, on_long_prompt="drop")


def test_a_generator_and_a_file_have_their_shares(tmp_path: Path) -> None:
    generated = SourceConfig(path=f"{__name__}:Squares", weight=3.0)
    other = SourceConfig(path=f"{__name__}:Squares", options={"every": 5})
    mixture = {"file": SourceConfig(path=write(tmp_path / "file.jsonl", *[None] * 4)), "new": generated, "few": other}
    found = training_prompts(DataConfig(mixture=mixture), RENDERER, lambda source: True)
    asked = [row_of(found, o).messages[0].content for o in range(500)]
    assert sum(text.startswith("file ") for text in asked) == 100
    assert len({text for text in asked if not text.startswith("file ")}) == 300 + 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": "no.such:Thing"}, "No module named 'no'"),
        ({"train": f"{__name__}:Absent"}, "has no attribute 'Absent'"),
        ({"train": f"{__name__}:Squares", "options": {"colour": 1}}, "unexpected keyword argument 'colour'"),
        ({"train": f"{__name__}:Squares", "curriculum": CurriculumConfig(key="pass_rate")}, "rows of the generator"),
        ({"options": {"every": 2}}, "arguments of a generator"),
        ({"train": f"{__name__}:Forgets"}, "it is another one: a retry or a resume"),
        ({"train": f"{__name__}:short_list"}, "[100000]"),
        ({"train": f"{__name__}:HalfCharacter"}, "half a character"),
        ({"train": "", "mixture": {"a": SourceConfig(path="a.jsonl")}, "options": {"b": 1}}, "sources have options"),
    ],
)
def test_a_generator_that_cannot_be_used_is_named(tmp_path: Path, changes, expected: str) -> None:
    data = DataConfig(**{"train": write(tmp_path / "a.jsonl", None)} | changes)
    with pytest.raises((DataError, ConfigError), match=re.escape(expected)):
        training_prompts(data, RENDERER, lambda source: True)
    with pytest.raises(DataError, match="no end"):
        list(read_rows(f"{__name__}:Squares"))


def test_names_of_the_hub_are_no_generators() -> None:
    names = "gsm8k:train", "openai/gsm8k:test", "a.jsonl", "c:\\data", "x:y:z", "org/a.b:c"
    assert not any(map(is_generator, (*names, "docs:train", "__main__:train")))
    assert is_generator("my_tasks.sums:Sums")
    assert is_generator("json:Sums")


# -- one source --------------------------------------------------------------------------------------------------------


num_rows = st.integers(1, 60)
seeds = st.integers(0, 2**64 - 1)


@given(num_rows, seeds, st.booleans(), st.integers(0, 10**12))
def test_each_epoch_visits_each_row_once(rows: int, seed: int, shuffle: bool, epoch: int) -> None:
    stream = PromptStream(rows, seed, shuffle)
    ordinals = range(epoch * rows, (epoch + 1) * rows)
    assert sorted(stream.row_index(ordinal) for ordinal in ordinals) == list(range(rows))
    assert {stream.epoch(ordinal) for ordinal in ordinals} == {epoch}


@given(num_rows, seeds, st.lists(st.integers(0, 500), max_size=40))
def test_the_order_of_calls_does_not_matter(rows: int, seed: int, ordinals: list[int]) -> None:
    stream = PromptStream(rows, seed)
    assert [stream.row_index(o) for o in ordinals] == [PromptStream(rows, seed).row_index(o) for o in ordinals]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        stream = PromptStream(100, seed)
        return tuple(stream.row_index(epoch * 100 + position) for position in range(100))

    orders = {order(seed, epoch) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64
    assert tuple(range(100)) not in orders


def test_every_row_comes_first_about_equally_often() -> None:
    first = [PromptStream(5, seed).row_index(0) for seed in range(2000)]
    assert all(330 < first.count(row) < 470 for row in range(5))  # 400 expected, standard deviation 18


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    stream = PromptStream(3, seed=0, shuffle=False)
    assert [stream.row_index(ordinal) for ordinal in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_never_changes() -> None:
    """A checkpoint of an older release must find its prompts again."""
    stream = PromptStream(10, seed=7)
    assert [stream.row_index(ordinal) for ordinal in range(20)] == GOLDEN


GOLDEN = [8, 1, 3, 2, 4, 7, 0, 6, 9, 5, 6, 8, 4, 2, 0, 9, 7, 1, 3, 5]


@pytest.mark.parametrize(("rows", "seed"), [(0, 0), (-1, 0), (3, -1)])
def test_arguments_out_of_range_are_refused(rows: int, seed: int) -> None:
    with pytest.raises(ValueError, match="num_rows="):
        PromptStream(rows, seed)


def test_a_negative_ordinal_is_refused() -> None:
    with pytest.raises(ValueError, match="ordinal=-1"):
        PromptStream(3, 0).row_index(-1)
