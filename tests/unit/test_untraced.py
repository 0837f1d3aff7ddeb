"""Actor classes that hold a plain object."""

import inspect

import pytest
from ray import cloudpickle
from ray.util.tracing.tracing_helper import _inject_tracing_into_class

from asyncrl.driver.actors import untraced
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.rollout.rollouter import Rollouter


class Base:
    async def line(self):
        return self.words()


class Held(Base):
    """What it does."""

    def __init__(self, first, *, last):
        self._first, self.last = first, last

    def words(self, *more):
        return self._joined([self._first, *more, self.last])

    async def refuse(self):
        raise ValueError("no")

    def _joined(self, words):
        return " ".join(words)


async def test_it_has_the_public_methods_and_those_of_its_bases():
    made = untraced(Held)("a", last="z")
    assert (type(made).__name__, type(made).__doc__) == ("Held", "What it does.")
    assert {name for name in dir(made) if not name.startswith("_")} == {"line", "words", "refuse"}
    assert made.words("b", "c") == "a b c z"
    assert await made.line() == "a z"
    with pytest.raises(ValueError, match="no"):
        await made.refuse()


async def test_it_travels_as_ray_sends_it_and_tracing_wraps_nothing_of_the_object():
    sent = untraced(Held)
    _inject_tracing_into_class(sent)
    made = cloudpickle.loads(cloudpickle.dumps(sent))("a", last="z")
    assert made._inner.__class__ is Held
    assert "_ray_trace_ctx" not in str(inspect.signature(Held._joined)) + str(inspect.signature(Held.words))
    assert await made.line() == "a z"


@pytest.mark.parametrize("cls", [MessageQueue, Rollouter])
def test_what_ray_runs_as_coroutines_stays_one(cls):
    public = {name: method for name, method in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"}
    made = untraced(cls)
    assert {name: inspect.iscoroutinefunction(getattr(made, name)) for name in public} == {
        name: inspect.iscoroutinefunction(method) for name, method in public.items()
    }
