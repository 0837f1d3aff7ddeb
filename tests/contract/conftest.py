"""Environments that a test starts, and a small model."""

import pytest
import pytest_asyncio

from asyncrl.environments import build_environment
from asyncrl_testing.random_model import write_random_qwen3
from tests.environments import chat_with


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def started():
    """started(recipe, chat=None) -> environment, which is closed at the end."""
    made = []

    async def call(recipe, chat=None):
        made.append(build_environment(recipe, chat or chat_with()))
        await made[-1].start()
        return made[-1]

    yield call
    for environment in made:
        await environment.close()
