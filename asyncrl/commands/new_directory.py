"""A directory that exists only when it is complete."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import ConfigError, StorageError, explain


def require_new(out: Path) -> None:
    """Raises ConfigError: there is something at `out`."""
    if out.exists() or out.is_symlink():
        raise ConfigError(explain(f"export to {out}", "it exists", "name a directory that does not exist yet"))


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` when what is inside has not raised. Raises StorageError."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise StorageError(explain(f"write {out}", str(error), "make room there, or name another directory")) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
