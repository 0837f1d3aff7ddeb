import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.prompt_stream import PromptStream

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
