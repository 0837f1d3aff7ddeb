"""Connections to actors: what is called and answered, who is let in, what becomes of calls when a connection ends."""

import asyncio
import copy
import gc
import logging
import pickle
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from asyncrl.driver.fleet.actor_channels import ReplicaActorChannel
from asyncrl.errors import DeadlineExceeded, Process, ProcessDied
from asyncrl.remote import actor_client
from asyncrl.remote import connection as connections
from asyncrl.remote.actor_client import ActorClient
from asyncrl.remote.connection import ConnectionEnded, connect, serve
from tests.waiting import until

LOCAL = "127.0.0.1"


class Unwritable(Exception):
    def __reduce__(self):
        raise TypeError("not this one")


class Unreadable(Exception):
    """Pickled with one argument, made with two."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Actor:
    """Notes its calls."""

    def __init__(self):
        self.made = []
        self.go = asyncio.Event()

    async def echo(self, value, *, after_s=0.0):
        self.made.append(value)
        await asyncio.sleep(after_s)
        return value

    def plain(self, value):
        return value

    async def wait(self):
        self.made.append("wait")
        await self.go.wait()
        return "went"

    async def fail(self, error):
        raise error if isinstance(error, Exception) else ValueError(error)

    async def fail_by_name(self, name):
        raise {"unwritable": Unwritable, "unreadable": lambda: Unreadable(1, 2)}[name]()

    async def unwritable(self):
        return lambda: 1

    async def unreadable(self):
        return Unreadable(1, 2)

    async def _private(self):
        return "private"


class Remote:
    """A method of an actor's handle."""

    def __init__(self, method):
        self._method = method

    def remote(self, *args, **kwargs):
        return asyncio.ensure_future(self._method(*args, **kwargs))


class Handle:
    """Stands for Ray's handle of `actor`; `dead`: Ray knows that it has died."""

    def __init__(self, actor, *, is_direct=True, address=None):
        self.actor, self.dead, self.connections_asked, self.through_ray = actor, False, 0, 0
        self.server, self._is_direct, self._address = None, is_direct, address
        self.ask = asyncio.Event()
        self.ask.set()

    @property
    def connection(self):
        async def connection():
            await self.ask.wait()
            if self.dead:
                raise RayActorError()
            self.connections_asked += 1
            if not self._is_direct:
                return None
            self.server = await serve(self.actor, LOCAL)
            return self._address or self.server.address

        return Remote(connection)

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.through_ray += 1
            return await getattr(self.actor, name)(*args, **kwargs)

        return Remote(call)


def client_of(handle):
    return ActorClient(handle, Process("actor", 3), is_direct=True)


def called():
    """A handle and its client."""
    handle = Handle(Actor())
    return handle, client_of(handle)


@pytest.fixture
def actor():
    return Actor()


@pytest.fixture
async def server(actor):
    return await serve(actor, LOCAL)


@pytest.fixture
async def connection(server):
    return await connect(server.address)


async def cut(connection):
    """Ends the connection as the death of the other process does."""
    connection._end._transport.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class TestCalls:
    async def test_values_and_keywords_arrive(self, connection):
        big = bytes(5_000_000)
        assert await connection.call("echo", (big,), {"after_s": 0.01}) == big
        assert await connection.call("plain", (3,), {}) == 3

    async def test_calls_begin_in_order_and_are_answered_as_they_end(self, actor, connection):
        ended = []
        answers = [connection.call("echo", (i,), {"after_s": 0.05 - 0.01 * i}) for i in range(5)]
        for answer in answers:
            answer._future.add_done_callback(lambda future: ended.append(future.result()))
        assert [await answer for answer in answers] == [0, 1, 2, 3, 4]
        assert actor.made == [0, 1, 2, 3, 4]
        assert ended == [4, 3, 2, 1, 0]

    async def test_what_the_method_raises_is_raised_with_the_traceback_there(self, connection):
        error = ProcessDied("the engine is dead").of(Process("replica", 1))
        with pytest.raises(ProcessDied, match="the engine is dead") as raised:
            await connection.call("fail", (error,), {})
        assert raised.value.process == error.process
        assert "in fail" in str(raised.value.__cause__)

    @pytest.mark.parametrize("name", ["unwritable", "unreadable"])
    async def test_an_error_that_cannot_travel_is_told_by_its_text(self, connection, name):
        with pytest.raises(RuntimeError, match=rf"(?i){name}") as raised:
            await connection.call("fail_by_name", (name,), {})
        assert "in fail_by_name" in str(raised.value.__cause__)

    @pytest.mark.parametrize(
        ("method", "args", "error"),
        [
            ("unwritable", (), "(?i)pickle"),
            ("echo", (lambda: 1,), "(?i)pickle"),
            ("echo", (Unreadable(1, 2),), "second"),
            ("unreadable", (), "second"),
        ],
        ids=["the value there", "an argument here", "an argument there", "the value here"],
    )
    async def test_what_cannot_be_written_or_read_fails_its_call_alone(self, connection, method, args, error):
        with pytest.raises(Exception, match=error):
            await connection.call(method, args, {})
        assert await connection.call("echo", (1,), {}) == 1

    async def test_an_error_whose_type_is_not_installed_here_is_told_by_its_text(self, connection, monkeypatch):
        monkeypatch.setattr(
            connections.pickle,
            "dumps",
            lambda error, *rest: (
                b"cno_such_package\nError\n." if isinstance(error, Exception) else pickle._dumps(error, *rest)
            ),
        )
        with pytest.raises(RuntimeError, match="ValueError: of a package") as raised:
            await connection.call("fail", ("of a package",), {})
        assert "in fail" in str(raised.value.__cause__)

    @pytest.mark.parametrize("error", [asyncio.CancelledError(), StopIteration(3)])
    async def test_what_no_future_can_hold_is_answered_too(self, error):
        class Ends(Actor):
            def end(self):
                raise error

        server = await serve(Ends(), LOCAL)
        connection = await connect(server.address)
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await connection.call("end", (), {})
        assert await connection.call("echo", (1,), {}) == 1

    async def test_private_and_unknown_methods_are_refused(self, connection):
        for name in ("_private", "__class__", "nothing"):
            with pytest.raises(AttributeError, match=name):
                await connection.call(name, (), {})

    async def test_an_answer_can_be_awaited_again(self, actor, connection):
        answer = connection.call("wait", (), {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await answer
        actor.go.set()
        assert await answer == "went"

    @given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30), data=st.data())
    def test_messages_are_the_same_however_they_are_cut(self, sizes, data):
        sent = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
        stream, taken = framed(sent), []

        class End(connections._End):
            def _take(self, message):
                taken.append(message)

        async def feed():
            end = End(b"")
            end._is_proven = True
            at = 0
            while at < len(stream):
                count = data.draw(st.integers(1, 200))
                end.data_received(stream[at : at + count])
                at += count
            end.connection_lost(None)

        asyncio.run(feed())
        assert taken == sent


class Trap:
    """Running its pickle is noticed."""

    sprung = False

    def __reduce__(self):
        return Trap._spring, ()

    @staticmethod
    def _spring():
        Trap.sprung = True


def framed(messages):
    return b"".join(struct.pack("<Q", len(message)) + message for message in messages)


async def spoken_to(server, stream):
    """What an actor answers to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(stream)
    async with asyncio.timeout(5):
        answered = await reader.read()
    writer.close()
    return answered


class TestStrangers:
    async def test_who_has_another_secret_is_not_connected(self, server):
        address = server.address
        with pytest.raises(ConnectionEnded):
            await connect(connections.ConnectionAddress(address.host, address.port, bytes(32)))

    @pytest.mark.parametrize(
        "messages",
        [
            [b"\0" * 32, b"\0" * 32],
            [b"\0" * 32, b""],
            [b"", b""],
            [b"\0" * 32, b"\0" * 64],
        ],
    )
    async def test_nothing_of_who_has_no_secret_is_unpickled(self, server, messages):
        call = struct.pack("<Q", 1) + pickle.dumps(("echo", (Trap(),), {}))
        answered = await spoken_to(server, framed([*messages, call]))
        assert not Trap.sprung
        assert len(answered) <= 72, "its challenge and its proof, at most"

    async def test_a_long_message_of_a_stranger_is_not_waited_for(self, server):
        assert await spoken_to(server, struct.pack("<Q", 1 << 40)) == b""

    async def test_who_says_nothing_is_not_waited_for(self, server, monkeypatch):
        monkeypatch.setattr(connections, "HANDSHAKE_S", 0.05)
        connection = await connect(server.address)
        assert await spoken_to(server, b"") == b""
        assert await connection.call("echo", (1,), {}) == 1, "who has proven itself stays"

    @pytest.mark.parametrize("answers", [True, False])
    async def test_an_actor_that_cannot_prove_itself_is_neither_believed_nor_waited_for(self, answers, monkeypatch):
        async def impostor(reader, writer):
            if not answers:
                return await asyncio.sleep(1)
            await reader.read(40)
            writer.write(struct.pack("<Q", 64) + bytes(64))

        if not answers:
            monkeypatch.setattr(connections, "HANDSHAKE_S", 0.05)
        server = await asyncio.start_server(impostor, LOCAL, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionEnded if answers else (ConnectionEnded, TimeoutError)):
            await connect(connections.ConnectionAddress(LOCAL, port, bytes(32)))
        server.close()

    async def test_strangers_are_few(self, server, connection, monkeypatch):
        monkeypatch.setattr(connections, "MAX_STRANGERS", 2)
        address = server.address
        strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
        assert await spoken_to(server, b"") == b""
        assert await connection.call("echo", (1,), {}) == 1
        strangers[0][1].close()
        await asyncio.sleep(0.05)
        other = await connect(address)
        assert await other.call("echo", (1,), {}) == 1
        strangers[1][1].close()


class TestEnds:
    async def test_calls_that_are_not_answered_end_with_their_connection(self, connection):
        answer = connection.call("wait", (), {})
        await cut(connection)
        with pytest.raises(ConnectionEnded):
            await answer
        assert connection.ended
        with pytest.raises(ConnectionEnded):
            await connection.call("echo", (1,), {})

    async def test_a_call_goes_on_in_the_actor_when_its_connection_ends(self, actor, connection):
        connection.call("wait", (), {})
        connection.call("echo", (1,), {"after_s": 0.05})
        await until(lambda: len(actor.made) >= 2)
        await cut(connection)
        ended = asyncio.all_tasks()
        actor.go.set()
        await asyncio.sleep(0.1)
        assert all(task.done() and not task.cancelled() for task in ended - {asyncio.current_task()})

    async def test_the_end_of_the_actor_ends_the_connection(self, actor, connection):
        answer = connection.call("wait", (), {})
        await until(lambda: actor.made)
        answering = next(e for e in gc.get_objects() if isinstance(e, connections._Answering) and e._actor is actor)
        answering._transport.abort()
        with pytest.raises(ConnectionEnded):
            await answer
        assert connection.ended

    async def test_a_connection_that_nobody_holds_is_closed(self, server):
        connection = await connect(server.address)
        end = connection._end
        gc.disable()
        try:
            del connection
            await asyncio.sleep(0.01)
        finally:
            gc.enable()
        assert end.ended

    async def test_an_idle_connection_is_closed(self, actor, server, monkeypatch):
        monkeypatch.setattr(connections, "IDLE_S", 0.1)
        connection = await connect(server.address)
        answer = connection.call("wait", (), {})
        for _ in range(3):
            await asyncio.sleep(0.1)
            assert not connection.ended, "a call is in progress"
        actor.go.set()
        await answer
        await asyncio.sleep(0.4)
        assert connection.ended


async def waiting():
    """A handle, its client, and a call that the actor has begun and does not end."""
    handle, client = called()
    call = asyncio.create_task(client.call(5, Actor.wait))
    await until(lambda: handle.actor.made)
    return handle, client, call


class TestActorClient:
    async def test_calls_go_over_one_connection(self):
        handle, client = called()
        assert [await client.call(5, Actor.echo, i) for i in range(3)] == [0, 1, 2]
        assert (handle.connections_asked, handle.through_ray) == (1, 0)

    async def test_calls_begin_in_their_order_also_while_the_connection_is_opened(self):
        handle, client = called()
        handle.ask.clear()
        calls = [asyncio.create_task(client.call(5, Actor.echo, i)) for i in range(3)]
        await asyncio.sleep(0.01)
        handle.ask.set()
        number = 3
        while not calls[0].done():  # one more in every turn of the loop
            calls.append(asyncio.create_task(client.call(5, Actor.echo, number)))
            number += 1
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
        assert handle.actor.made == list(range(number))

    @pytest.mark.parametrize("address", [None, connections.ConnectionAddress(LOCAL, 1, bytes(32))])
    async def test_without_a_connection_calls_go_through_ray(self, address, caplog):
        handle = Handle(Actor(), is_direct=address is not None, address=address)
        client = client_of(handle)
        with caplog.at_level(logging.WARNING):
            assert [await client.call(5, Actor.echo, i) for i in range(3)] == [0, 1, 2]
        assert (handle.connections_asked, handle.through_ray) == (1, 3)
        assert len(caplog.messages) == (address is not None), "who cannot be reached is told once"

    async def test_a_process_has_ended_when_its_connection_has_whatever_ray_says(self, monkeypatch):
        """A stopped process that is killed: Ray calls it dead some seconds before the kernel ends it."""
        handle, client = called()
        assert await client.call(5, Actor.echo, 1) == 1

        async def dead():
            raise RayActorError()

        handle.actor.plain = dead
        end = asyncio.create_task(client.ended(5, Actor.plain))
        await asyncio.sleep(0.1)
        assert not end.done()
        await cut(client._connection._connection)
        await end
        assert await client.call(5, Actor.echo, 2) == 2
        monkeypatch.setattr(actor_client, "LINGERS_S", 0.0)
        await client.ended(5, Actor.plain)

    async def test_a_deadline_names_the_call_and_the_process(self):
        client = client_of(Handle(Actor()))
        with pytest.raises(DeadlineExceeded, match=r"wait of actor 3") as raised:
            await client.call(0.05, Actor.wait)
        assert raised.value.process == client.process
        assert await client.call(5, Actor.echo, 1) == 1

    async def test_a_deadline_holds_while_the_connection_is_opened(self):
        handle = Handle(Actor())
        handle.ask.clear()
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="echo of actor 3"):
            await client_of(handle).call(0.05, Actor.echo, 1)
        assert time.monotonic() - began < 2
        handle.ask.set()

    async def test_a_call_that_its_caller_has_given_up_is_not_made(self, monkeypatch):
        monkeypatch.setattr(actor_client, "SLEPT_S", 0.0)
        handle, client = called()
        handle.ask.clear()
        with pytest.raises(DeadlineExceeded):
            await client.call(0.05, Actor.echo, "late")
        patient = asyncio.create_task(client.call(5, Actor.echo, "patient"))
        await asyncio.sleep(0.05)
        handle.ask.set()
        assert await patient == "patient"
        assert handle.actor.made == ["patient"]

    async def test_nobody_complains_of_calls_that_were_given_up(self):
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        handle, client = called()
        handle.ask.clear()
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await client.call(0.01, Actor.echo, 1)
        handle.dead = True
        handle.ask.set()
        await asyncio.sleep(0.05)
        gc.collect()
        assert not complaints

    async def test_of_a_process_that_died_ray_says_so(self):
        handle, client, call = await waiting()
        handle.dead = True
        await cut(client._connection._connection)
        with pytest.raises(ProcessDied, match="wait of actor 3"):
            await call
        with pytest.raises(ProcessDied, match="echo of actor 3"):
            await client.call(5, Actor.echo, 1)

    async def test_a_process_that_lives_is_called_over_another_connection(self):
        handle, client, call = await waiting()
        await cut(client._connection._connection)
        with pytest.raises(DeadlineExceeded, match="may have done") as raised:
            await call
        assert raised.value.process == client.process
        asked = handle.connections_asked
        assert await client.call(5, Actor.echo, 1) == 1
        assert (handle.connections_asked, handle.through_ray) == (asked + 1, 0)

    async def test_an_opening_that_failed_is_tried_again(self):
        handle, client = called()
        handle.dead = True
        with pytest.raises(ProcessDied):
            await client.call(5, Actor.echo, 1)
        handle.dead = False
        assert await client.call(5, Actor.echo, 1) == 1

    async def test_who_gets_a_client_opens_a_connection_of_its_own(self):
        handle, client = called()
        assert await client.call(5, Actor.echo, 1) == 1
        other = copy.copy(client._connection)  # as pickle does: the connection itself cannot be written
        assert other._connection is None
        assert await other.call(5, "echo", (2,), {}) == 2
        assert handle.connections_asked == 2
        with pytest.raises(TypeError):
            pickle.dumps(client._connection._connection)


async def test_a_collection_whose_connection_broke_takes_nothing_of_the_next_channel():
    """The replica may still be waiting in it when the client is connected again."""

    class Outboxes(Actor):
        def __init__(self):
            super().__init__()
            self.clients = []

        async def collect(self, client_id, wait_s, gather_s):
            self.clients.append(client_id)
            await self.go.wait()
            return []

        async def submit(self, client_id, requests, external, incarnation):
            self.clients.append(client_id)

    handle = Handle(Outboxes())
    former, later = (ReplicaActorChannel(0, handle, "rollouter-1") for _ in range(2))
    orphan = asyncio.create_task(former.collect(1.0, 0.0))
    await later.submit([])
    await asyncio.sleep(0.05)
    first, second = handle.actor.clients
    assert first != second
    assert {first.partition("/")[0], second.partition("/")[0]} == {"rollouter-1"}, "who is forgotten by this name"
    handle.actor.go.set()
    await orphan


async def test_where_calls_must_be_encrypted_there_is_no_connection(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert await connections.HasConnections().connection() is None
