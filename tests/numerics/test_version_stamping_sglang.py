"""SGLang against the suite of exact versions: its scheduler is another process, reached through the protocol alone."""

from functools import partial

import pytest

from asyncrl_testing.stamping_suite import StampingSuite
from tests.engines import sglang_engine
from tests.numerics.test_version_stamping import EngineCase

pytestmark = pytest.mark.sglang


class SglangCase(EngineCase, StampingSuite):
    build = staticmethod(partial(sglang_engine, stream_interval=1, max_total_tokens=1 << 14))


class TestSglangTied(SglangCase):
    tied = True


@pytest.mark.slow
class TestSglangUntied(SglangCase):
    tied = False
    transport = "collective"
