"""vLLM against the suite of exact versions: EngineCore is another process, reached through the protocol alone."""

import pytest

from asyncrl_testing.stamping_suite import StampingSuite
from tests.engines import vllm_engine
from tests.numerics.test_version_stamping import EngineCase

pytestmark = pytest.mark.usefixtures("one_thread")


class TestVllmTied(EngineCase, StampingSuite):
    tied = True
    build = staticmethod(vllm_engine)


@pytest.mark.slow
class TestVllmUntied(EngineCase, StampingSuite):
    tied = False
    build = staticmethod(vllm_engine)
