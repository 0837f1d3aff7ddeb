"""Python processes of tests that run to their end."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


@contextmanager
def killed(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """They are killed at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def assert_gone(processes: list[psutil.Process], within_s: float = 60.0) -> None:
    """They end within that time. Those that do not are killed."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    left = [process.cmdline() for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not alive, left


def ran(
    *words: Any, code: int | None = 0, timeout_s: float = 120.0, cwd: Path = ROOT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What this interpreter said when called with `words`. Fails unless it ended with `code`; None allows any.

    Args:
        options: of `subprocess.run`.
    """
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, **options)
    assert code is None or done.returncode == code, done.stdout[-5000:] + done.stderr
    return done
