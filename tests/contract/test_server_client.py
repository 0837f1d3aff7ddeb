"""Calls to a server whose connections end as those of vLLM's server do."""

import asyncio

import pytest

from asyncrl.inference.remote.server_client import Call, Refused, ServerClient

ANSWER = "HTTP/1.1 {}\r\ncontent-length: 2\r\n\r\n{{}}"


async def test_a_call_after_an_answer_of_500_takes_another_connection():
    """uvicorn closes the connection after it, some time later: a call that took it would fail."""
    answered = []

    async def serve(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            answered.append("500 no" if not answered else "200 OK")
            writer.write(ANSWER.format(answered[-1]).encode())
            await writer.drain()
            if answered[-1] == "500 no":
                await reader.read(1)  # what comes now is lost
                writer.close()
                return

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = ServerClient(f"http://127.0.0.1:{port}", None)
        with pytest.raises(Refused, match="answers 500"):
            await client.send(Call("/start"), 5)
        assert await client.send(Call("/start"), 5) == {}
        await client.close()
    assert len(answered) == 2
