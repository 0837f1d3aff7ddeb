"""Whether the hub answers at all."""

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from asyncrl.config.hub import use_cache_if_unreachable


class _Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def there() -> Iterator[str]:
    """A hub that refuses, and so is there."""
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def gone() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_the_cache_alone_is_searched_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, there: str, gone: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    for address, names, offline in ((there, ["a/b"], ""), (gone, [], ""), (gone, ["a/b"], "1"), (there, ["a/b"], "1")):
        monkeypatch.setenv("HF_ENDPOINT", address)
        use_cache_if_unreachable(names)
        assert os.environ["HF_HUB_OFFLINE"] == offline, "once set it stays"
