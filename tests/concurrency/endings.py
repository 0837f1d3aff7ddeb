"""What may leave the code of a user, by name; and a reward that raises it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from asyncrl.rewards import RewardResult


class Own(BaseException):
    """A user's own."""


class Unspeakable(Exception):
    """Cannot even be printed."""

    def __str__(self):
        raise SystemExit("str")


def _raises(error: Callable[[], BaseException]) -> Callable[[], Awaitable[None]]:
    async def raises():
        raise error()

    return raises


async def _cancelled_helper():
    helper = asyncio.create_task(asyncio.sleep(600))
    helper.cancel()
    await helper


async def _cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(600)


async def _scope():
    """As a framework that closes its cancel scope without the exception that it ends by."""
    import anyio

    scope = anyio.CancelScope()
    scope.__enter__()
    scope.cancel()
    try:
        await anyio.sleep(600)
    finally:
        scope.__exit__(None, None, None)


_given_up = threading.Event()


async def give_up():
    """Ends what ignores its cancellation in this event loop: whoever closes the loop of a test waits for every task."""
    _given_up.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    _given_up.clear()


async def _swallows_and_waits():
    while not _given_up.is_set():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass


async def _swallows_and_returns():
    return


ENDINGS: dict[str, Callable[[], Awaitable[None]]] = {
    "ValueError": _raises(lambda: ValueError("no")),
    "Unspeakable": _raises(Unspeakable),
    "StopIteration": _raises(StopIteration),
    "StopAsyncIteration": _raises(StopAsyncIteration),
    "SystemExit": _raises(lambda: SystemExit(3)),
    "KeyboardInterrupt": _raises(KeyboardInterrupt),
    "GeneratorExit": _raises(GeneratorExit),
    "Own": _raises(Own),
    "BaseExceptionGroup": _raises(lambda: BaseExceptionGroup("both", [SystemExit(1), ValueError("no")])),
    "CancelledError": _raises(asyncio.CancelledError),
    "CancelledError of a helper": _cancelled_helper,
    "CancelledError of itself": _cancels_itself,
    "CancelledError of a scope": _scope,
}
IGNORES = {"swallows and waits": _swallows_and_waits, "swallows and returns": _swallows_and_returns}
"""What else may be done about a cancellation."""


async def reward(response, row):
    """Raises what the response names."""
    if response in ENDINGS:
        await ENDINGS[response]()
    return RewardResult(float(len(response) % 2))
