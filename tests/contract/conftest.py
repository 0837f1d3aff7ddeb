"""Environments that a test starts."""

import pytest_asyncio

from asyncrl.environments import build_environment
from tests.environments import chat_with


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
