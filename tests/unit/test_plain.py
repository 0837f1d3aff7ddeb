"""Values of JSON become records, or an error that names the place."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Le
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.json_records import from_plain
from asyncrl.queue.ledger import LedgerSnapshot
from asyncrl.ranges import NonNegative, Share


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    pairs: tuple[tuple[str, float], ...] = ()
    inner: Inner | None = None
    digit: Annotated[int, Ge(0), Le(9)] = 0
    seconds: NonNegative = 0.0
    shares: Mapping[str, Share] = field(default_factory=dict)


OUTER = st.builds(
    Outer,
    inner=st.none() | st.builds(Inner, share=st.floats(allow_nan=False)),
    digit=st.integers(0, 9),
    seconds=st.floats(0, allow_infinity=False),
    shares=st.dictionaries(st.text(), st.floats(0, 1)),
)


@given(OUTER)
def test_what_was_written_comes_back(value):
    assert from_plain(Outer, json.loads(json.dumps(asdict(value)))) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "count is a str where int is due"),
        ({"count": True}, "count is a bool where int is due"),
        ({"flag": 1}, "flag is a int where bool is due"),
        ({"flag": None}, "flag is a NoneType"),
        ({"pairs": {}}, "pairs is a dict where list is due"),
        ({"pairs": [["a"]]}, "pairs[0] has 1 items, not 2"),
        ({"pairs": [["a", "b"]]}, "pairs[0][1] is a str where float is due"),
        ({"inner": {"kind": "c"}}, "inner.kind is 'c', none of a, b"),
        ({"inner": {"kind": ["a"]}}, "none of a, b"),
        ({"inner": {}}, "inner.kind is missing"),
        ({"inner": 3}, "inner is a int where object is due"),
        ({"more": 3}, "more is unknown"),
        ({"digit": 10}, "digit is 10, not finite and at least 0 and at most 9"),
        ({"digit": 1.0}, "digit is a float where int is due"),
        ({"seconds": math.inf}, "seconds is inf, not finite"),
        ({"seconds": math.nan}, "seconds is nan, not finite"),
        ({"seconds": 10**400}, "seconds is 1000"),
        ({"shares": [1]}, "shares is a list where object is due"),
        ({"shares": {"a": 1, "b": -0.1}}, "shares.b is -0.1, not finite and at least 0 and at most 1"),
    ],
)
def test_the_place_is_named(change, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        from_plain(Outer, {"count": 3, "flag": True} | change)
    assert message in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "version", "counts", "records", "ordinal"]), inner, max_size=4)
    ),
)


@given(json_values)
def test_any_other_value_is_refused_by_value_error(value):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the place
        from_plain(LedgerSnapshot, value)
