"""The real `asyncrl-serve`: Ray, two replicas of the tiny model, OpenAI's client, a kill -9, a signal."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from asyncrl.commands import serve as serve_command
from tests.e2e.conftest import MODEL, ROOT


def test_a_fleet_serves_survives_a_kill_and_ends_with_a_signal(serve):
    server = serve("--replicas", "2", "--api-key", "secret", "torch.max_model_len=1024")
    found = server.wait_for(lambda f: len(f["replicas"]) == 2, "no fleet")
    assert (found["model"], found["engine"], found["pid"]) == (MODEL, "torch", server.process.pid)
    assert all(r["alive"] and r["version"] == 0 and r["node"] for r in found["replicas"])
    pids = {str(r["id"]): r["pid"] for r in found["replicas"]}
    (forks,) = [
        p for p in server.descendants() if p.ppid() == server.process.pid and "fork_server" in " ".join(p.cmdline())
    ]
    assert {psutil.Process(pid).ppid() for pid in pids.values()} == {forks.pid}, "replicas have its imports"
    client = openai.OpenAI(base_url=found["address"] + "/v1", api_key="secret", max_retries=0, timeout=60)

    question = {"role": "user", "content": "12+7="}
    answer = client.chat.completions.create(model=MODEL, messages=[question], temperature=0, max_tokens=40)
    assert answer.choices[0].message.content
    again = client.chat.completions.create(model=MODEL, messages=[question], temperature=0, max_tokens=40, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in again) == answer.choices[0].message.content
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()

    def long_answer(seed, on_first):
        """Streams 900 tokens; `on_first` is told the replica as soon as tokens arrive."""
        ids, versions = [], None
        body = {"ignore_eos": True, "return_token_ids": True}
        with client.completions.with_streaming_response.create(
            model=MODEL, prompt="1+1=", max_tokens=900, seed=seed, stream=True, extra_body=body
        ) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not ids:
                    on_first(response.headers["x-replica-id"])
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                ids += choice.get("token_ids", [])
                versions = choice.get("weight_versions", versions)
        return ids, versions

    killed = []

    def kill_first(replica):
        killed.append(replica)
        if len(killed) == 1:  # immediately: it has most of its tokens still to come
            os.kill(pids[replica], signal.SIGKILL)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(long_answer, seed, kill_first) for seed in range(4)]
        for future in running:
            ids, versions = future.result(180)
            assert len(ids) == 900
            assert versions == [{"version": 0, "start": 0, "end": 900}]
    victim = killed[0]
    replaced = server.wait_for(
        lambda f: all(r["alive"] and r["pid"] != pids[victim] for r in f["replicas"]), "it is not replaced"
    )
    assert {str(r["id"]): r["pid"] for r in replaced["replicas"] if str(r["id"]) != victim}.items() <= pids.items()
    health = httpx.get(found["address"] + "/health", timeout=10)
    assert (health.status_code, health.json()) == (200, {"serving": 2, "replicas": 2})
    interruptions = httpx.get(found["address"] + "/metrics", headers={"authorization": "Bearer secret"}, timeout=10)
    assert "asyncrl_interruptions_total 0\n" not in interruptions.text

    code, alive = server.end(signal.SIGTERM)
    assert (code, alive) == (128 + signal.SIGTERM, [])
    assert not server.file.exists()


@pytest.mark.slow
def test_without_any_replica_it_ends_and_says_why(serve):
    server = serve("recovery.max_replica_restarts=0")
    found = server.wait_for(lambda f: True, "no fleet")
    os.kill(found["replicas"][0]["pid"], signal.SIGKILL)
    assert server.process.wait(150) == 1
    assert "raise recovery.max_replica_restarts" in server.output.read_text()
    assert not server.file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no/such/model"], "no such directory"),
        ([MODEL, "torch.max_model_length=5"], "did you mean rollout.torch.max_model_len?"),
        ([MODEL, "torch.max_model_len=9999"], "max_position_embeddings=1024"),
        ([MODEL, "--port", "{taken}"], "Address already in use"),
        ([MODEL, "--discovery-file", "/nowhere/at/all.json"], "is no directory"),
    ],
)
def test_bad_input_is_told_before_anything_starts(inputs, capsys, monkeypatch, options, message):
    monkeypatch.chdir(ROOT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [o.replace("{taken}", str(taken.getsockname()[1])) for o in options]
        port = [] if "--port" in words else ["--port", "0"]
        code = serve_command.main([*words, *port])
    told = capsys.readouterr().err
    assert code == 2, told
    for part in ("asked:", "found:", "do:", message):
        assert part in told
