"""Tests whether the Hugging Face hub is reachable. For launch code."""

from __future__ import annotations

import logging
import os
import queue
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Longest wait for any answer of the hub."""


def use_cache_if_unreachable(names: Iterable[str]) -> None:
    """Sets HF_HUB_OFFLINE, for this process and its run, if `names` are given and the hub does not answer: Hugging
    Face's libraries would retry every file for half a minute. Call it before importing these libraries. Does nothing if
    the variable is set."""
    wanted = sorted(set(names))
    if not wanted or os.environ.get("HF_HUB_OFFLINE"):
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not _answers(address):
        logger.warning("%s does not answer: only the cache is searched for %s", address, ", ".join(wanted))
        os.environ["HF_HUB_OFFLINE"] = "1"


def _answers(address: str) -> bool:
    """Probes in a thread, because name resolution ignores timeouts."""
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(_probe(address)), name="hub probe", daemon=True).start()
    try:
        return found.get(timeout=PROBE_S)
    except queue.Empty:
        return False


def _probe(address: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PROBE_S):
            return True
    except urllib.error.HTTPError:
        return True  # someone is there
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # reachable; the libraries check certificates
    except (OSError, ValueError):
        return False
