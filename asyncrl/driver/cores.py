"""Cores that processes of this machine may use."""

from __future__ import annotations

import os


def local_cores() -> int:
    """Those that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS binds no process to cores
