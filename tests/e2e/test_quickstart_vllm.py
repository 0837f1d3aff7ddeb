"""The quickstart with real vLLM: the same model behind another engine, and a dead engine process in the middle."""

import pytest

from tests.e2e.conftest import assert_a_dead_engine_is_replaced

pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)

pytestmark = pytest.mark.timeout(900)


def test_vllm_serves_what_is_published_and_its_dead_engine_is_replaced(start):
    assert_a_dead_engine_is_replaced(start, "quickstart_vllm")
