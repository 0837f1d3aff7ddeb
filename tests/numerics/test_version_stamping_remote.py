"""`vllm serve` against the suite of exact versions: weights come through asyncrl's extension, or vLLM's own reload."""

import pytest
import pytest_asyncio

from asyncrl.weights.transports.collective import NativeSender
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import BoundarySuite, StampingSuite
from tests.engines import remote_engine, running
from tests.make import require_vllm
from tests.vllm_server import NATIVE, VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]


class RemoteCase(BoundarySuite):
    weights = "extension"
    flags = ()

    @classmethod
    def server(cls, path, log):
        """Not started."""
        require_vllm()
        flags = ("--skip-tokenizer-init", "--max-model-len", "512", *cls.flags)
        return VllmServer(path, log, *flags, extension=cls.weights == "extension")

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("server")
        path = write_random_qwen3(directory / "model", tie_word_embeddings=cls.tied)
        server = cls.server(path, directory / "log").start()
        try:
            async with running(remote_engine(server, path, weights=cls.weights)) as engine:
                yield engine
        finally:
            server.kill()


class TestServersWithTheExtension(RemoteCase, StampingSuite):
    tied = True
    transport = "disk"


class TestServersThatReceiveByGloo(RemoteCase):
    tied = False
    transport = "collective"


class TestServersThatReload(RemoteCase):
    tied = False
    transport = "disk"
    weights = "reload"


class TestServersThatVllmSendsTo(RemoteCase):
    """vLLM's own sender and endpoints, with gloo in place of NCCL."""

    tied = False
    weights = "native"
    flags = (*NATIVE, "--worker-extension-cls", "tests.native_over_gloo.Extension")

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def shared_publisher(cls, engine):
        from tests.native_over_gloo import join_gloo

        publisher = Publisher(engine, sender=NativeSender(1 << 18, 1, device="cpu", host="127.0.0.1", join=join_gloo))
        yield publisher
        await publisher.close()
