"""`rollout.serve`: OpenAI's own client asks the policy while it is trained, in one real run."""

import contextlib
import json
import os
import signal
import threading
import time

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import MODEL, SMALL, finish
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PUBLISH_TIMEOUT_S = 60


def fleet(run, condition, what):
    """The discovery file of the run, once `condition` holds for it."""

    def found():
        with contextlib.suppress(FileNotFoundError):
            read = json.loads((run.directory / "serving.json").read_text())
            return read if condition(read) else None

    return run.wait_for(found, what)


def published(run):
    return max((e["version"] for e in run.events if e["event"] == "publish"), default=-1)


class Clients:
    """Threads that stream answer after answer; each records (version before, spans, version after, tokens)."""

    def __init__(self, run, address, key, count):
        self.answers, self.failures, self._stop = [], [], threading.Event()
        self._client = openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0, timeout=100)
        self._run = run
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed):
        body = {"ignore_eos": True, "return_token_ids": True}
        while not self._stop.is_set():
            before, ids, spans = published(self._run), [], []
            try:
                for chunk in self._client.completions.create(
                    model=MODEL, prompt="12+7=", max_tokens=120, seed=seed, stream=True, extra_body=body
                ):
                    choice = chunk.choices[0].model_dump()
                    ids += choice.get("token_ids") or []
                    spans = choice.get("weight_versions") or spans
            except Exception as error:  # noqa: BLE001 - a connection that closes in the middle has many names
                self.failures.append(error)
                time.sleep(0.5)
                continue
            self.answers.append((before, spans, published(self._run), ids))

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


def assert_versions_are_right(answers):
    """Spans tile the answer, versions rise, and none is from before the request or from after its end."""
    for before, spans, after, ids in answers:
        assert len(ids) == 120
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 120
        versions = [span["version"] for span in spans]
        assert versions == sorted(versions)
        # A replica commits a moment before the event of the publish is written.
        assert before <= versions[0]
        assert versions[-1] <= after + 1


def test_clients_ask_while_it_trains_and_its_server_is_killed(start, monkeypatch):
    monkeypatch.setenv("ASYNCRL_API_KEY", "a-key-of-clients")
    run = start(
        *SMALL,
        "run.max_steps=2000",
        "rollout.serve.enabled=true",
        "rollout.serve.wait_timeout_s=90",
        "rollout.sampling.max_response_tokens=64",
        f"weights.publish_timeout_s={PUBLISH_TIMEOUT_S}",
        "ray.health_interval_s=0.5",
    )
    found = fleet(run, lambda f: all(r["version"] is not None for r in f["replicas"]) and f["replicas"], "a server")
    address, key = found["address"], {"authorization": "Bearer a-key-of-clients"}
    assert (found["model"], found["engine"], len(found["replicas"])) == (MODEL, "torch", 2)

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address + "/v1", api_key="wrong", max_retries=0).models.list()
    for replica in found["replicas"]:
        one = openai.OpenAI(base_url=replica["address"] + "/v1", api_key="a-key-of-clients", max_retries=0, timeout=100)
        question = {"role": "user", "content": "12+7="}
        raw = one.chat.completions.with_raw_response.create(model=MODEL, messages=[question], max_tokens=8)
        assert raw.headers["x-replica-id"] == str(replica["id"])
        assert raw.parse().choices[0].message.content is not None

    first = published(run)
    clients = Clients(run, address, "a-key-of-clients", count=3)
    run.wait_for_event("publish", count=first + 8)
    assert not clients.failures
    os.kill(found["pid"], signal.SIGKILL)
    killed_at = published(run)
    again = fleet(run, lambda f: f["pid"] != found["pid"], "another server")
    assert again["address"] == address
    count = len(clients.answers)
    wait_until(lambda: len(clients.answers) >= count + 3, f"three answers after {clients.failures}", 360)
    run.wait_for_event("publish", count=killed_at + 3)
    clients.stop()
    assert_versions_are_right(clients.answers)
    assert any(len(spans) > 1 for _, spans, _, _ in clients.answers), "no answer met a publish"
    page = httpx.get(address + "/metrics", headers=key, timeout=20).text
    assert 'asyncrl_replica_up{replica="1"} 1' in page

    finish(run)
    assert not (run.directory / "serving.json").exists()
    assert not psutil.pid_exists(again["pid"])
    lines = run.metrics
    assert lines[-1]["serve/restarts"] == 1
    assert sum(line["serve/tokens"] for line in lines) >= 120 * len(clients.answers)
    assert 0 < max(line["serve/token_share"] for line in lines) <= 1
    assert max(line["weights/publish_s"] for line in lines) < PUBLISH_TIMEOUT_S
    assert {line["serve/up"] for line in lines} <= {0, 1}
    assert max(line["serve/up"] for line in lines) == 1
