"""`sglang.launch_server` against the suite of exact versions: its own loader reads the files of transport `disk`."""

import pytest

from asyncrl_testing.stamping_suite import StampingSuite
from tests.make import require_sglang
from tests.numerics.test_version_stamping_remote import RemoteCase
from tests.sglang_server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


class TestUntiedAndStartedWithoutWeights(RemoteCase, StampingSuite):
    transport = "disk"
    tied = False
    weights = "reload"

    @classmethod
    def server(cls, path, log):
        require_sglang()
        return SglangServer(path, log, "--context-length", "518", "--load-format", "dummy")
