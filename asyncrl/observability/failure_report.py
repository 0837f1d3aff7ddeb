"""Evidence of a failure: one directory below `<run>/faults/` with what failed and what every process was doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from asyncrl.observability import stacks

TAIL_LINES = 60


def write_report(
    directory: Path,
    error: BaseException,
    *,
    waits: list[str],
    processes: list[psutil.Process],
    log: Path,
    outputs: Sequence[Path] = (),
    hide: Callable[[str], str] = str,
) -> Path:
    """Writes `report.txt` and `stacks/<pid>-<name>.txt` of every process; returns the new directory.

    Args:
        waits: the open waits of the driver (`waits.WAITS.lines()`).
        processes: of the run on this machine; on other machines use `py-spy dump`.
        log: the run's log; its last lines are copied.
        outputs: further files whose last lines are copied.
        hide: applied to the report.

    Raises OSError if the report cannot be written.
    """
    # A second failure of the same kind within a second gets a number.
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{type(error).__name__}"
    number = sum(path.name.startswith(base) for path in directory.glob("*")) if directory.exists() else 0
    place = directory / (f"{base}-{number}" if number else base)
    (place / "stacks").mkdir(parents=True)
    lines = [f"{type(error).__name__}: {error}", ""]
    if (process := getattr(error, "process", "")) != "":
        lines += [f"process: {process}", ""]
    lines += ["The driver waits for:", *(waits or ["nothing"]), "", "Processes:"]
    # Hanging processes are included: `stacks.read` needs no answer from Python code.
    for process in processes:
        try:
            name, status = " ".join(process.cmdline())[:80] or process.name(), process.status()
            cpu = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        lines.append(f"{process.pid:8d}  {status:10s} {cpu.user + cpu.system:8.1f} s CPU  {name}")
        short = "".join(c if c.isalnum() else "_" for c in name.partition(" ")[0].rpartition("/")[2])[:40]
        (place / "stacks" / f"{process.pid}-{short}.txt").write_text(stacks.read(process.pid))
    lines += ["", f"The end of {log.name}:", *_tail(log)]
    for output in outputs:
        if tail := _tail(output):
            lines += ["", f"The end of {output.name}:", *tail]
    (place / "report.txt").write_text(hide("\n".join(lines)) + "\n")
    return place


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError as error:
        return [str(error)]
