"""Objects below a URL, through fsspec."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from asyncrl.errors import ConfigError, explain

REACHABLE = "see that this machine reaches the store, and what its credentials allow"
"""Advice for errors of the store."""
CHECK_S = 60.0
"""Longest wait for a store's answer in `check_store`."""
T = TypeVar("T")


def is_url(directory: str) -> bool:
    """True for a URL of object storage, False for a directory."""
    return "://" in directory


class ObjectStore:
    """The objects below one URL."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: fsspec does not know the URL, or lacks a package for it."""
        from fsspec.core import url_to_fs

        try:
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            do = "install the package that fsspec names (s3fs, gcsfs, adlfs), on all machines, or correct the URL"
            raise ConfigError(explain(f"weights.disk_directory={url}", str(error), do)) from error
        self._has_directories = "file" in self._files.protocol

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        if self._has_directories:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def get(self, name: str) -> bytes:
        return self._files.cat_file(f"{self._root}/{name}")

    def remove(self, name: str) -> None:
        """Removes all objects below `name`, if any."""
        path = f"{self._root}/{name}"
        self._files.invalidate_cache()
        if self._files.exists(path):
            self._files.rm(path, recursive=True)


def check_store(url: str) -> None:
    """Raises ConfigError: an object cannot be written, read and deleted below this URL."""
    store, name, data = ObjectStore(url), f"asyncrl-probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    asked = f"weights.disk_directory={url}"

    def tried() -> bytes:
        store.put(f"{name}/0", data)
        found = store.get(f"{name}/0")
        store.remove(name)
        return found

    done = in_thread(tried)
    try:
        found = done.result(timeout=CHECK_S)
    except Exception as error:
        if not done.done():
            raise ConfigError(explain(asked, f"no answer within {CHECK_S:g} s", REACHABLE)) from None
        raise ConfigError(explain(asked, f"{type(error).__name__}: {error}", REACHABLE)) from error
    if found != data:
        raise ConfigError(explain(asked, "an object reads otherwise than it was put", REACHABLE))


def in_thread(work: Callable[[], T], name: str = "objects") -> Future[T]:
    """Runs `work` in a daemon thread of this name, so that a store that never answers cannot block the process's
    exit."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - thread boundary: whoever waits raises it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
