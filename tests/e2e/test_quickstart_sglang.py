"""The quickstart with real SGLang: it learns, and a dead engine process in the middle."""

import importlib.util

import pytest

from tests.e2e.conftest import assert_a_dead_engine_is_replaced, assert_sound

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.sglang,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the package sglang: make test-sglang"),
]


def test_sglang_serves_what_is_published_and_its_dead_engine_is_replaced(start):
    assert_a_dead_engine_is_replaced(start, "quickstart_sglang")


def test_it_learns_with_a_clean_audit(start):
    run = start("run.max_steps=24", "eval.every_steps=12", recipe="quickstart_sglang", joined=False)
    assert run.wait(1000) == 0, run.log
    assert_sound(run, max_lag=2, steps=24)
    assert run.metrics[-1]["eval/accuracy"] >= 0.9
