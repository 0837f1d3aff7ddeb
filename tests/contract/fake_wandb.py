"""A server that answers W&B's own client as far as these tests go, and keeps what it is sent."""

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "me"


@dataclass
class FakeRun:
    """`history`: the lines by their place in the file, as the file stream sends them."""

    name: str
    project: str
    config: str = "{}"
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: str = "{}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.history[place] for place in sorted(self.history)]


class FakeWandb:
    """Owns the server; `runs` and `views` are what it was sent."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.tables = True
        """False: it refuses tables."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self._body()
                if self.path.startswith("/graphql"):
                    self._answer(fake.graphql(json.loads(body)))
                else:
                    if self.path.endswith("/file_stream"):
                        fake.stream(self.path.split("/")[-2], json.loads(body))
                    self._answer({})

            def do_PUT(self) -> None:
                self._body()
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def _body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

            def _answer(self, found: dict[str, Any]) -> None:
                text = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # W&B's process resets its connections when it ends

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def stream(self, name: str, body: dict[str, Any]) -> None:
        for file, part in (body.get("files") or {}).items():
            run = self.runs[name]
            if file == "wandb-history.jsonl":
                run.history.update(enumerate(map(json.loads, part["content"]), start=part["offset"]))
            if file == "wandb-summary.json":
                run.summary = part["content"][-1]

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        query, variables = asked["query"], asked.get("variables") or {}
        for word, answer in (
            ("upsertBucket", self._upsert),
            ("RunResumeStatus", self._resume_status),
            ("createRunFiles", self._files),
            ("artifactType", lambda variables: {"project": {"artifact": None}} if self.tables else {}),
            ("createArtifact(", self._artifact),
            ("upsertView", self._upsert_view),
            ("allViews", self._find_view),
            ("RunFragment", self._run),
            ("historyKeys", self._run),
            ("parquetHistory", self._history),
            ("sampledHistory", self._sampled),
            ("viewer", self._viewer),
        ):
            if word in query:
                return {"data": answer(variables)}
        return {"data": {}}

    def _viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u", "username": ENTITY, "entity": ENTITY, "flags": "{}", "teams": {"edges": []}}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = variables["name"] in self.runs
        run = self.runs.setdefault(variables["name"], FakeRun(variables["name"], variables["project"]))
        run.config = variables.get("config") or run.config
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": not known}}

    def _run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        if run is None:
            return {"project": {"run": None}}
        keys = {"lastStep": max((row["_step"] for row in run.rows), default=-1), "keys": {}}
        own = {"projectId": "1", "state": "finished", "user": {"name": ENTITY, "username": ENTITY}, "historyKeys": keys}
        return {"project": {"run": self._bucket(run) | own}}

    def _history(self, variables: dict[str, Any]) -> dict[str, Any]:
        rows = self.runs[variables["runName"]].rows
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": rows}}}}

    def _sampled(self, variables: dict[str, Any]) -> dict[str, Any]:
        spec = json.loads(variables["spec"])
        rows = [
            {key: row[key] for key in spec["keys"]}
            for row in self.runs[variables["run"]].rows
            if set(spec["keys"]) <= row.keys() and spec["minStep"] <= row["_step"] <= spec["maxStep"]
        ]
        return {"project": {"run": {"sampledHistory": [rows]}}}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        found = self._bucket(run) if run else None
        return {"model": {"id": "p", "name": variables["project"], "entity": _ENTITY, "bucket": found}}

    def _bucket(self, run: FakeRun) -> dict[str, Any]:
        rows = run.rows
        return {
            "id": run.name,
            "name": run.name,
            "displayName": run.name,
            "project": {"id": "p", "name": run.project, "entity": _ENTITY},
            "historyLineCount": len(rows),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(rows[-1])] if rows else []),
            "eventsTail": json.dumps(["{}"]),
            "summaryMetrics": run.summary,
            "config": run.config,
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }

    def _files(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Says that it has it already: nothing is uploaded."""
        sequence = {"id": "s", "name": "s", "latestArtifact": {"id": "a", "versionIndex": 0}}
        return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = variables["name"] in self.views
        self.views[variables["name"]] = variables
        return {"upsertView": {"view": {"id": variables["name"], "name": variables["name"]}, "inserted": not known}}

    def _find_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        view = self.views.get(variables["viewName"])
        node = view and {"id": view["name"], "displayName": view["displayName"], "spec": view["spec"]}
        return {"project": {"allViews": {"edges": [{"node": node}] if node else []}}}


_ENTITY = {"id": "e", "name": ENTITY}
