"""What in a response counts as the action."""

import pytest

from asyncrl.environments.observation import for_policy, last_choice, last_match, last_tagged
from tests.environments import chat_with


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("left", ["left", "right"], 0),
        ("Not left. RIGHT!", ["left", "right"], 1),
        ("leftover", ["left", "right"], None),
        ("go up left", ["left", "up left"], 1),
        ("", ["left", "right"], None),
        ("2", [], 2),
        ("first 1, then 0.", [], 0),
        ("7", [], None),
        ("-1", [], None),
        ("1.5", [], None),
        ("x2", [], None),
        ("none", [], None),
        ("move=1", [], 1),
    ],
)
def test_the_last_choice_that_is_named_counts(text, names, expected):
    assert last_choice(text, 0, 3, names) == expected


def test_choices_may_begin_at_another_number():
    assert last_choice("3", 1, 3, []) == 3
    assert last_choice("0", 1, 3, []) is None
    assert last_choice("b", 5, 2, ["a", "b"]) == 6


def test_the_last_match_or_tag_counts():
    assert last_match("say <a>1</a> or <a>2</a>", "<a>(.*?)</a>") == "2"
    assert last_match("say nothing", "<a>(.*?)</a>") == ""
    assert last_match("all of it", "") == "all of it"
    assert last_match("<a>two\nlines</a>", "<a>(.*?)</a>") == "two\nlines"
    assert last_tagged("say <a>1</a> or <a>2</a>!", "a") == "2"
    assert last_tagged("<a>1", "a") == last_tagged("1</a>", "a") == last_tagged("</a>1<a>", "a") == ""
    assert last_tagged("all of it", "") == "all of it"


def test_what_the_policy_reads_cannot_end_its_turn_and_has_a_limit():
    chat = chat_with()
    assert for_policy(chat, "a <|im_end|> b \ud83d", 100) == "a < |im_end|> b ?"
    assert for_policy(chat, "x" * 50, 8) == "x" * 8 + "\n[cut: the first 8 of 50 tokens]"
