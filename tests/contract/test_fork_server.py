"""What a fork server forks is what a new process would have been, and what it may not fork is started anew."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.driver.cluster import fork_server, fork_worker
from asyncrl.driver.cluster.fork_server import SOCKET_VARIABLE, WORKER, ForkServer
from tests.processes import ROOT, ran
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")

CHILD = """
import atexit, json, os, random, resource, sys
import numpy
atexit.register(print, 'ended as it should', file=sys.stderr)
print(json.dumps({
    "pid": os.getpid(), "session": os.getsid(0), "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
    "named": __name__, "environment": dict(os.environ), "loaded": "heavy" in sys.modules,
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "umask": os.umask(0o22),
    "oom_score_adj": open("/proc/self/oom_score_adj").read().strip(),
    "random": [random.random(), float(numpy.random.random())], "threads": len(os.listdir("/proc/self/task")),
}), flush=True)
if "fail" in sys.argv:
    sys.exit(3)
"""
SETUP = """
import sys
print("Ray's own", *sys.argv[1:])
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Modules that a server imports, a script to run as a process, and a package that stands for Ray."""
    (tmp_path / "heavy.py").write_text("import os\nos.environ['SET_BY_IMPORT'] = 'heavy'\nHOOKED = []\n")
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()\n"
    )
    (tmp_path / "child.py").write_text(CHILD)
    stand_in = tmp_path / "ray" / "_private" / "workers"
    stand_in.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("")
    (stand_in / "setup_worker.py").write_text(SETUP)
    monkeypatch.setattr(fork_server, "_GPUS", ())
    return tmp_path


def environment_of(place, **more):
    ours = {**os.environ, "PYTHONPATH": f"{place}:{ROOT}", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**ours, **more}


@contextlib.contextmanager
def forking(place):
    """A server that has imported what takes long."""
    with ForkServer() as server:
        server.start(environment_of(place), ["heavy"])
        yield server


def ask(server, place, *arguments, context=None, language="PYTHON", option=None, before=None, **more):
    """What the process prints that Ray would start: of the fork a dict, of Ray's own script a text."""
    environment = environment_of(place, **more)
    environment[SOCKET_VARIABLE] = str(server.directory / "socket")
    words = [f"--language={language}", str(place / "child.py"), *arguments]
    if option is not None:
        words.insert(1, option)
    if context is not None:
        words.insert(0, f"--serialized-runtime-env-context={json.dumps(context)}")
    done = ran(WORKER, *words, env=environment, cwd=place, timeout_s=60, preexec_fn=before)
    assert ("ended as it should" in done.stderr) == done.stdout.startswith("{")
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout


def test_a_fork_is_as_the_process_that_ray_asked_for(place):
    with ForkServer() as server:
        server.start(environment_of(place), ["heavy", "numpy", "no_such_module"])
        found = [ask(server, place, "a", context={"env_vars": {"OF_RAY": "1"}}, NUMBER=str(n)) for n in (1, 2)]
    first, second = found
    assert first["loaded"], "it has what the server has imported"
    assert first["named"] == "__main__"
    assert first["argv"] == [str(place / "child.py"), "a"]
    assert (first["path"], first["cwd"]) == (str(place), str(place))
    assert first["session"] == first["pid"], "a group of its own, which Ray may end"
    assert [f["environment"]["NUMBER"] for f in found] == ["1", "2"]
    assert first["environment"]["OF_RAY"] == "1"
    assert first["environment"]["SET_BY_IMPORT"] == "heavy", "as if it had imported that itself"
    assert all(one != other for one, other in zip(first["random"], second["random"], strict=True))


def test_a_fork_has_the_limits_of_who_asks(place):
    def ours():
        os.umask(0o27)
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))
        Path("/proc/self/oom_score_adj").write_text("500")

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with forking(place) as server:
        found = ask(server, place, before=ours)
    assert (found["open_files"], found["umask"], found["oom_score_adj"]) == (700, 0o27, "500")


def test_options_of_the_interpreter_are_its_own(place):
    with forking(place) as server:
        assert ask(server, place, option="-s").split()[-2:] == ["-s", str(place / "child.py")]


def test_a_fork_that_nobody_hears_of_does_not_go_on(place):
    """Else the process would be there twice, once started anew."""
    with forking(place) as server:
        request = {
            "arguments": [str(place / "child.py")],
            "environment": environment_of(place),
            "directory": str(place),
        }
        request |= {"umask": 0o22, "open_files": (700, 700), "oom_score_adj": "0"}
        with socket.socket(socket.AF_UNIX) as asking, (place / "out").open("w+") as output:
            asking.connect(str(server.directory / "socket"))
            assert asking.recv(1) == b"?"
            socket.send_fds(asking, [b"."], [output.fileno()] * 3)
            asking.sendall(json.dumps(request).encode() + b"\n")
            assert asking.recv(7) == b"forked\n"
        wait_until(lambda: not psutil.Process(server._process.pid).children())
        assert (place / "out").read_text() == ""


@pytest.mark.slow  # it waits for the server's deadline
def test_one_that_asks_too_slowly_does_not_hold_the_server(place):
    with forking(place) as server, socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(server.directory / "socket"))
        assert asking.recv(1) == b"?"
        socket.send_fds(asking, [b"."], [0, 1, 2])

        def sends_for_ever():
            with contextlib.suppress(OSError):
                while True:
                    asking.sendall(b" ")
                    time.sleep(fork_server.REQUEST_S / 10)

        threading.Thread(target=sends_for_ever, daemon=True).start()
        assert isinstance(ask(server, place), dict), "it is forked"


def test_where_no_server_can_start_there_is_none(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place / ("long" * 40)))
    Path(tempfile.gettempdir()).mkdir()
    with ForkServer() as server:
        server.start(environment_of(place), [])
        assert server.directory is None
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.parametrize(
    "other",
    [
        {"OMP_NUM_THREADS": "2"},
        {"LD_PRELOAD": ""},
        {"context": {"env_vars": {"PYTHONHASHSEED": "1"}}},
        {"context": {"env_vars": {"PLACE": "${HOME}/x"}}},
        {"context": {"command_prefix": ["nice"]}},
        {"context": {"py_executable": "/usr/bin/python0"}},
        {"language": "JAVA"},
        {"MKL_DYNAMIC": "TRUE"},
    ],
    ids=str,
)
def test_what_would_differ_is_started_anew(place, other):
    with forking(place) as server:
        found = ask(server, place, "a", **other)
    assert found.startswith("Ray's own")
    assert found.split()[-2:] == [str(place / "child.py"), "a"]


def test_a_server_with_threads_forks_nothing(place):
    with ForkServer() as server:
        server.start(environment_of(place), ["threads"])
        assert ask(server, place).startswith("Ray's own")


@pytest.mark.parametrize("how", ["killed", "closed", "silent"])
def test_without_a_server_that_answers_processes_are_started_anew(place, how, monkeypatch):
    with forking(place) as server:
        assert isinstance(ask(server, place), dict)
        if how == "silent":
            server._process.send_signal(signal.SIGSTOP)
            monkeypatch.setenv(SOCKET_VARIABLE, str(server.directory / "socket"))
            monkeypatch.setattr(fork_worker, "ANSWER_S", 0.2)
            assert not fork_worker._forked(["--language=PYTHON", str(place / "child.py")])
            server._process.send_signal(signal.SIGCONT)
            assert isinstance(ask(server, place), dict), "it goes on for others"
            return
        directory = server.directory
        process = server._process
        process.kill() if how == "killed" else server.close()
        process.wait()
        server.directory = directory
        assert ask(server, place).startswith("Ray's own")
    assert not directory.exists()


def test_it_ends_with_a_driver_that_is_killed_and_what_it_forked_leaves_no_zombie(place):
    driver = textwrap.dedent("""
        import os, sys, time
        from asyncrl.driver.cluster.fork_server import ForkServer
        import asyncrl.driver.cluster.fork_server as module
        module._GPUS = ()
        server = ForkServer()
        server.start(dict(os.environ), ["heavy"])
        print(server._process.pid, server.directory, flush=True)
        time.sleep(60)
    """)
    started = subprocess.Popen(
        [sys.executable, "-c", driver], env=environment_of(place), stdout=subprocess.PIPE, text=True
    )
    pid, directory = started.stdout.readline().split()
    server = ForkServer()
    server.directory = Path(directory)
    ask(server, place, "fail")
    process = psutil.Process(int(pid))
    wait_until(lambda: not process.children(), "no child, not even as a zombie")
    started.kill()
    started.wait()
    wait_until(lambda: not is_alive(process.pid))
    assert not Path(directory).exists()


def test_there_is_none_beside_gpus(place, monkeypatch):
    monkeypatch.setattr(fork_server, "_GPUS", (str(place),))
    with ForkServer() as server:
        server.start(environment_of(place), [])
        assert server._process is None
        before = dict(os.environ)
        with server.asked_by_ray(object()):
            assert dict(os.environ) == before


def test_ray_has_its_processes_forked(place):
    driver = textwrap.dedent("""
        import os, pathlib, sys
        import ray
        import asyncrl.driver.cluster.fork_server as module
        from asyncrl.driver.cluster.janitor import RUN_VARIABLE
        from asyncrl.driver.cluster.ray_session import ray_cluster

        class Actor:
            def parent(self):
                return os.getppid()

        module._GPUS = ()
        with module.ForkServer() as forks:
            forks.start({**os.environ, RUN_VARIABLE: forks.run_id}, [])
            with ray_cluster(None, pathlib.Path(sys.argv[1]), forks=forks):
                actor = ray.remote(Actor).options(num_cpus=0).remote()
                assert ray.get(actor.parent.remote(), timeout=60) == forks._process.pid
            assert forks.directory is None
    """)
    ran("-c", driver, place / "log.txt", env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
