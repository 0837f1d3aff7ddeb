"""The command lines of `docker` that sandboxes use, on this machine alone: a container is a directory below
FAKE_CONTAINERS, and the processes that have its name in their environment. Other flags are refused."""

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "FAKE_CONTAINER"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version")
    run = commands.add_parser("run", allow_abbrev=False)
    for flag in ("--rm", "--interactive", "--init"):
        run.add_argument(flag, action="store_true", required=True)
    for option in ("--name", "--network", "--security-opt", "--workdir", "--entrypoint"):
        run.add_argument(option, required=True)
    run.add_argument("--volume", action="append", default=[])
    run.add_argument("image")
    inside = commands.add_parser("exec", allow_abbrev=False)
    inside.add_argument("--interactive", action="store_true", required=True)
    inside.add_argument("--env", action="append", default=[])
    inside.add_argument("name")
    inside.add_argument("line", nargs=argparse.REMAINDER)
    remove = commands.add_parser("rm", allow_abbrev=False)
    for flag in ("--force", "--volumes"):
        remove.add_argument(flag, action="store_true", required=True)
    remove.add_argument("name")
    options = parser.parse_args()
    return {"version": lambda _: 0, "run": runs, "exec": runs_inside, "rm": removes}[options.command](options)


def place(name: str) -> Path:
    return Path(os.environ["FAKE_CONTAINERS"], name)


def runs(options: argparse.Namespace) -> int:
    if options.image == "missing":
        sys.stderr.write("no such image\n")
        return 125
    assert (options.entrypoint, options.workdir) == ("cat", "/workspace")
    place(options.name).mkdir()
    environment = {**os.environ, MARK: options.name}
    subprocess.run(["cat"], env=environment, check=False)
    return removes(options)


def runs_inside(options: argparse.Namespace) -> int:
    if not place(options.name).is_dir():
        sys.stderr.write("no such container\n")
        return 1
    inherited = {name: os.environ[name] for name in ("PATH", *options.env)}
    try:
        environment = {**inherited, MARK: options.name}
        code = subprocess.run(options.line, cwd=place(options.name), env=environment, check=False).returncode
        return 128 - code if code < 0 else code
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 127


def removes(options: argparse.Namespace) -> int:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == options.name:
                process.kill()
    shutil.rmtree(place(options.name), ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
