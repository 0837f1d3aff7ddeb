"""The server's metrics, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from asyncrl.chat.connection_limits import REASONS, Reason
from asyncrl.serving.choice import Finished
from asyncrl.serving.fleet import Fleet

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Histogram:
    """Durations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*_BUCKETS_S, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class ServingMetrics:
    """Counts since the server started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.in_flight = 0
        self.waiting = 0
        """Requests whose answer has no token yet."""
        self.disconnects = 0
        self.refusals: Counter[Reason] = Counter()
        """By reason; counted by the connection limiter."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.interruptions = 0
        self.request_s = Histogram()
        self.first_token_s = Histogram()

    @property
    def refused(self) -> int:
        """Requests refused with a request to retry later."""
        return sum(n for (path, status), n in self.requests.items() if status in (429, 503) and path != "/health")

    def count_choice(self, prompt_tokens: int, finished: Finished) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += finished.cached_tokens
        self.generated_tokens += finished.num_tokens
        self.interruptions += finished.interruptions

    def render(self, fleet: Fleet) -> str:
        """The page for a Prometheus server."""
        lines: list[str] = []

        def metric(name: str, kind: str, help_text: str, values: Sequence[tuple[str, float]]) -> None:
            lines.extend((f"# HELP asyncrl_{name} {help_text}", f"# TYPE asyncrl_{name} {kind}"))
            lines.extend(f"asyncrl_{name}{labels} {value:.12g}" for labels, value in values)

        requests = [
            (f'{{endpoint="{endpoint}",status="{status}"}}', n)
            for (endpoint, status), n in sorted(self.requests.items())
        ]
        metric("requests_total", "counter", "HTTP requests that were answered.", requests)
        metric("requests_in_flight", "gauge", "Requests that are being answered.", [("", self.in_flight)])
        metric("requests_waiting", "gauge", "Those of them without a token so far.", [("", self.waiting)])
        metric("disconnects_total", "counter", "Requests whose client left early.", [("", self.disconnects)])
        refusals = [(f'{{reason="{reason}"}}', self.refusals[reason]) for reason in REASONS]
        metric("refusals_total", "counter", "Connections that were not served, or closed.", refusals)
        metric("prompt_tokens_total", "counter", "Prompt tokens, once per choice.", [("", self.prompt_tokens)])
        metric("cached_prompt_tokens_total", "counter", "Those found in a prefix cache.", [("", self.cached_tokens)])
        hit_rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        metric("prefix_cache_hit_rate", "gauge", "Cached over all prompt tokens.", [("", hit_rate)])
        metric("generated_tokens_total", "counter", "Tokens in answers.", [("", self.generated_tokens)])
        metric("interruptions_total", "counter", "Times a response was resumed.", [("", self.interruptions)])
        loads = [(f'{{replica="{i}"}}', n) for i, n in fleet.client.loads.items()]
        metric("replica_requests", "gauge", "Requests in flight per replica.", loads)
        states = fleet.reports
        metric(
            "replica_up", "gauge", "1 while it serves.", [(f'{{replica="{s.replica_id}"}}', s.alive) for s in states]
        )
        versions = [(f'{{replica="{s.replica_id}"}}', s.version) for s in states if s.alive and s.version is not None]
        metric("weight_version", "gauge", "Policy version that a replica serves.", versions)
        for name, help_text, histogram in (
            ("request_seconds", "Time of a whole request.", self.request_s),
            ("time_to_first_token_seconds", "Time until the first token of a request.", self.first_token_s),
        ):
            lines.extend((f"# HELP asyncrl_{name} {help_text}", f"# TYPE asyncrl_{name} histogram"))
            lines.extend(histogram.lines(f"asyncrl_{name}"))
        return "\n".join(lines) + "\n"
