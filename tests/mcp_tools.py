"""An MCP server for tests: `python tests/mcp_tools.py` speaks on standard input and output, with a port as its argument
streamable HTTP on it, with sessions."""

import io
import os
import sys
import time

import anyio
import PIL.Image
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools for tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool(name="process-id")
def process_id() -> str:
    """The process that answers."""
    return str(os.getpid())


@server.tool()
async def rest(seconds: float) -> str:
    """Answers late."""
    await anyio.sleep(seconds)
    return "rested"


@server.tool()
async def hang(seconds: float) -> str:
    """Keeps the whole server from answering."""
    time.sleep(seconds)  # noqa: ASYNC251 - on purpose
    return "hung"


@server.tool()
def picture() -> list[Image | str]:
    """A red square."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 16), "red").save(file, "png")
    return ["a square:", Image(data=file.getvalue(), format="png")]


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(7)


@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("nothing is here")


@server.tool()
def environment(variable: str) -> str:
    """A variable of the server's process."""
    return os.environ.get(variable, "(not set)")


def with_sessions(app):
    """The app as servers before 2026-07-28 are: they know `initialize` and sessions only."""

    async def older(scope, receive, send):
        version = dict(scope.get("headers", ())).get(b"mcp-protocol-version", b"")
        if version < b"2026":
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body"})

    return older


if __name__ == "__main__":
    if sys.argv[1:]:
        uvicorn.run(with_sessions(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
