"""A small model of a run: it acts at random, but only as a run may, and writes what a run writes."""

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncrl.audit import Audit, Limits
from asyncrl.audit.saved import GroupNow, Saved
from asyncrl.types import LedgerCounts

B, MAX_LAG, STEPS, REPLICAS = 2, 2, 5, 3
LIMITS = Limits(B, MAX_LAG, STEPS, REPLICAS, "first")
ENDS = ("trained", "filtered", "expired", "failed")
COUNTS = ("admitted", "running", "ready", "leased", *ENDS)
Event = dict[str, Any]
OF_QUEUE = ("group", "snapshot", "restored")


@dataclass
class State:
    """What a checkpoint keeps."""

    step: int = 0
    version: int = 0
    next_ordinal: int = 0
    groups: dict[int, list] = field(default_factory=dict)
    """ordinal -> [state, attempt, version]"""
    counts: Counter = field(default_factory=Counter)

    def copy(self) -> "State":
        groups = {ordinal: list(group) for ordinal, group in self.groups.items()}
        return State(self.step, self.version, self.next_ordinal, groups, Counter(self.counts))

    def of(self, *names: str) -> list[int]:
        return [ordinal for ordinal, group in self.groups.items() if group[0] in names]

    def all_counts(self) -> dict[str, int]:
        states = Counter("running" if g[0] == "waiting" else g[0] for g in self.groups.values())
        return {name: self.counts[name] + states[name] for name in COUNTS}


class Run:
    """`events` is its log, `metrics` its metrics by step, `saved` its snapshots by name and state, `checkpoints` those
    that were written. `limit` on the lag: that of its off-policy guard."""

    def __init__(self, seed: int, *, crashes: bool) -> None:
        self.rng = random.Random(seed)
        self.state = State()
        self.limit, self.guard_rng, self.teacher_rng = MAX_LAG, random.Random(-seed), random.Random(seed + 1)
        self.wanted, self.fleet_rng = REPLICAS, random.Random(seed + 2)
        self.events: list[Event] = []
        self.queue, self.queue_rng = "", random.Random(seed + 3)
        self.late: list[Event] = []
        """Lines of a queue that was given up."""
        self.metrics: dict[int, dict[str, float]] = {}
        self.saved: list[tuple[str, State]] = []
        self.checkpoints: dict[str, Saved] = {}
        self.replicas: dict[int, str] = {}
        self.restarts: Counter = Counter()
        self.takes_turns = seed % 5 == 1
        """Engines sleep before every step."""
        self.published = -1
        self.writing: int | None = None
        self.checkpoint = -1
        self.beside: tuple[int, int] | None = None
        self.start()
        acts = [self.admit, self.reissue, self.put, self.put, self.publish, self.fail, self.expire, self.snapshot]
        acts += [self.lose_replica, self.mend_replica, self.lose_rollouter]
        if crashes:
            acts += [self.restart] * 1
        for _ in range(self.rng.randrange(20, 150)):
            self.rng.choice([*acts, self.lease, self.commit])()
        while self.state.step < STEPS:
            assert len(self.events) < 10_000, "it does not come to its end"
            for act in (
                self.mend_all,
                self.publish,
                self.expire_overdue,
                self.reissue,
                self.admit,
                self.put,
                self.lease,
                self.commit,
            ):
                act()
        if self.checkpoint != STEPS:
            self.settle()
            if self.checkpoint != STEPS:
                self.snapshot()
                self.settle(fails=False)
        self.write("end", outcome="finished", step=self.state.step)

    def write(self, event: str, **fields: Any) -> None:
        now = float(len(self.events))
        writer = {"writer": self.queue if event in OF_QUEUE else "driver"}
        self.events.append({"event": event, "time_s": now, "monotonic_s": now, **fields, **writer})

    def wake(self) -> None:
        """A queue that was given up may run on, and writes what it has begun. It draws by itself."""
        late = [e for e in self.events if e["event"] in OF_QUEUE and e["writer"] != self.queue]
        if late and self.queue_rng.random() < 0.3:
            written = [dict(e) for e in late[-self.queue_rng.randint(1, 4) :]]
            self.events += written
            self.late += written

    # -- the driver --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        limits = {"groups_per_step": B, "max_lag": MAX_LAG, "max_steps": STEPS, "replicas": REPLICAS, "verify": "first"}
        self.write("start", name="model", resumed=bool(self.saved), pid=1, **limits)
        self.replicas = dict.fromkeys(range(REPLICAS), "new")
        self.wanted = REPLICAS
        self.restarts.clear()
        self.resume()

    def restart(self) -> None:
        """The driver dies, or the training side does; both go on from a checkpoint."""
        del self.saved[self.rng.randrange(len(self.saved)) + 1 if self.saved else 0 :]
        if self.rng.random() < 0.5:
            if self.rng.random() < 0.3:
                self.write("fault", error="RunFailed", message="it was too much")
            self.start()
            return
        self.write("training_failed", process="trainer rank 0", error="gone", step=self.state.step)
        self.lose_teacher()
        checkpoint = f"step_{self.saved[-1][1].step}" if self.saved else None
        self.write("training_restarted", process="trainer rank 0", seconds=1.0, checkpoint=checkpoint)
        self.replicas |= {i: "new" for i, now in self.replicas.items() if now in ("serving", "leased")}
        self.resume()

    def resume(self) -> None:
        self.published, self.writing, self.beside, self.limit = -1, None, None, MAX_LAG
        self.queue = f"queue{len(self.events)}"
        self.wake()
        if self.saved:
            name, saved = self.saved[-1]
            self.state = saved.copy()
            self.checkpoint = saved.step
            self.write("resume", step=saved.step, checkpoint=f"step_{saved.step}", queue=self.queue)
            self.wake()
            self.write("restored", snapshot=name, step=saved.step, counts=saved.all_counts())
            for ordinal in self.state.of("leased"):
                self.state.groups[ordinal][0] = "ready"
                self.group("released", ordinal)
            for ordinal in self.state.of("running", "waiting"):
                self.give_back(ordinal)
        else:
            self.checkpoint = -1
            self.write("resume", step=0, checkpoint=None, queue=self.queue)
            self.state = State()
        self.metrics = {step: line for step, line in self.metrics.items() if step <= self.state.step}
        if not any(now == "new" for now in self.replicas.values()):
            self.mend_all()
        self.wake()
        self.publish()
        if self.state.step == 0:
            self.initial = self.evaluate(0, self.published)

    def guard(self) -> None:
        """After a step. It draws by itself: the rest of the run stays as it is."""
        if self.guard_rng.random() < 0.6:
            return
        limit, acted = self.guard_rng.randint(0, MAX_LAG), self.guard_rng.random() < 0.8
        action = "tightened" if limit < self.limit else "relaxed"
        self.limit = limit if acted else self.limit
        self.write("guard_changed", step=self.state.step, action=action, limit=limit, acted=acted, reason="KL")

    def mend_all(self) -> None:
        while any(now in ("down", "suspended") for now in self.replicas.values()):
            self.mend_replica()

    def sleep(self) -> None:
        if self.takes_turns:
            asleep = [i for i, now in self.replicas.items() if now == "serving"]
            self.write("engines_slept", step=self.state.step + 1, replicas=asleep, begin_s=0.1)

    def publish_step(self) -> None:
        """Most steps are published, and each after which engines wake: for that a replica has to be up."""
        if self.takes_turns and not any(now in ("new", "serving") for now in self.replicas.values()):
            self.mend_all()
        if self.takes_turns or self.rng.random() < 0.7:
            self.publish()

    def publish(self) -> None:
        """To all where there is something new, else to those that have joined."""
        state = self.state
        new = [i for i, now in self.replicas.items() if now == "new"]
        serving = [i for i, now in self.replicas.items() if now == "serving"]
        again = self.published == state.step
        if (again and not new) or not (new or serving):
            return
        if not again:
            state.version = state.step
        if serving and not again and self.rng.random() < 0.3:
            self.put()  # the queue knows of the version already
        for i in new:
            self.replicas[i] = "serving"
            self.write("replica_serving", replica=i)
        replicas = len(new) if again else len(new) + len(serving)
        seconds = {"publish_s": 0.2, "pause_s": 0.1, "transfer_s": 0.1, "bytes": 100}
        self.write("publish", version=state.step, **seconds, verified=bool(new), attempts=1, replicas=replicas)
        self.published = state.step

    def lose_replica(self) -> None:
        up = [i for i, now in self.replicas.items() if now in ("new", "serving")]
        if up and self.rng.random() < 0.3:
            i = self.rng.choice(up)
            if self.rng.random() < 0.5:
                self.replicas[i] = "suspended"
                self.write("replica_suspended", replica=i, error="late")
            else:
                self.replicas[i] = "down"
                self.write("replica_failed", replica=i, error="dead", restarts=self.restarts["replica"])
                self.restarts["replica"] += 1

    def mend_replica(self) -> None:
        lost = [i for i, now in self.replicas.items() if now in ("down", "suspended")]
        if lost:
            i = self.rng.choice(lost)
            self.write("replica_started" if self.replicas[i] == "down" else "replica_rejoined", replica=i)
            self.replicas[i] = "new"

    def scale(self) -> None:
        """The fleet grows or shrinks, or a machine takes a replica away. It draws by itself."""
        rng = self.fleet_rng
        if rng.random() < 0.5:
            return
        wanted = rng.randint(REPLICAS, REPLICAS + 2)
        if wanted != self.wanted and rng.random() < 0.6:
            self.write("fleet_resized", replicas=wanted, former=self.wanted, asked_by="command")
            self.wanted = wanted
        idle = sorted(i for i, now in self.replicas.items() if now != "leased")
        while idle and idle[-1] >= REPLICAS and len(self.replicas) > self.wanted:
            self.leave(idle.pop(), "scaled")
        if len(idle) > 2 and rng.random() < 0.3:
            self.leave(rng.choice(idle), rng.choice(("preempted", "no_place")))
        if rng.random() < 0.7:
            for i in range(REPLICAS + 2):
                if i not in self.replicas and len(self.replicas) < self.wanted:
                    self.write("replica_joined", replica=i)
                    self.replicas[i] = "down"

    def leave(self, replica: int, why: str) -> None:
        del self.replicas[replica]
        self.write("replica_left", replica=replica, why=why)

    def lose_rollouter(self) -> None:
        if self.rng.random() < 0.2:
            self.write("rollouter_failed", error="dead", restarts=self.restarts["rollouter"])
            self.restarts["rollouter"] += 1
            running = self.state.of("running")
            for ordinal in running:
                self.give_back(ordinal)
            self.write("rollouter_restarted", seconds=1.0, groups=len(running))

    def lose_teacher(self) -> None:
        if self.teacher_rng.random() < 0.2:
            change = self.teacher_rng.choice(("replica_failed", "replica_serving"))
            self.write("model_replica", pool="teacher", replica=0, change=change, error="")

    def snapshot(self) -> None:
        if self.state.of("leased"):
            return
        self.settle()
        self.lose_teacher()
        name = f"{self.state.step}-{len(self.events):08x}"
        self.saved.append((name, self.state.copy()))
        self.write("snapshot", snapshot=name, step=self.state.step, counts=self.state.all_counts())
        self.writing = self.state.step

    def settle(self, *, fails: bool = True) -> None:
        """The checkpoint under way is written, or is not."""
        if self.writing is None:
            return
        step, self.writing = self.writing, None
        if self.rng.random() < 0.1:
            self.write("checkpoint_late", step=step, error="slow storage")
        if fails and self.rng.random() < 0.1:
            self.write("checkpoint_failed", step=step, error="no space")
            return
        self.checkpoint = step
        name, state = self.saved[-1]
        groups = {o: GroupNow(*group) for o, group in state.groups.items()}
        counts = LedgerCounts(**state.all_counts())
        now = (step, state.version, state.next_ordinal, counts, groups, B, MAX_LAG)
        self.checkpoints[name] = Saved(f"step_{step}", name, "", *now)
        self.write("checkpoint", step=step, path=f"step_{step}", save_s=0.2, capture_s=0.1)

    def evaluate(self, step: int, version: int, *, fails: bool = True) -> dict[str, float]:
        """The metrics of an evaluation of two sets, of which one may fail."""
        found: dict[str, float] = {}
        accuracies = []
        for name in ("easy", "hard"):
            if fails and name == "easy" and self.rng.random() < 0.1:
                self.write("evaluation_failed", step=step, version=version, tries=1, error="late")
                continue
            right = self.rng.randrange(11)
            accuracies.append(right / 10)
            counts = {"samples": 2, "prompts": 10, "questions": 9, "failed": 0}
            interval = [max(0.0, right / 10 - 0.2), min(1.0, right / 10 + 0.2)]
            fields = {"name": name, "accuracy": right / 10, "interval": interval, "pass_at": {"2": right / 10}}
            self.write("evaluation", step=step, version=version, **fields, **counts)
            found |= {f"eval/{what}/{name}": right / 10 for what in ("accuracy", "mean@2", "pass@2")}
        mean = {"eval/accuracy": sum(accuracies) / 2} if len(accuracies) == 2 else {"eval/failed": 1}
        return found | mean | {"eval/version": version}

    def evaluate_beside(self) -> dict[str, float]:
        """What came of the evaluation on a leased replica, if one was running; or begins one, or has to leave it."""
        if self.beside is None:
            free = [i for i, now in self.replicas.items() if now == "serving"]
            if len(free) > 1:
                self.replicas[free[-1]] = "leased"
                self.write("replica_leased", replica=free[-1])
                self.beside = (self.state.step, self.published)
                self.write("evaluation_started", step=self.state.step, version=self.published, replicas=free[-1:])
            return {}
        if self.rng.random() < 0.3:
            self.write("evaluation_skipped", step=self.state.step, running=self.beside[0])
            return {}
        (step, version), self.beside = self.beside, None
        for i in [i for i, now in self.replicas.items() if now == "leased"]:
            self.replicas[i] = "new"
            self.write("replica_returned", replica=i)
        if self.rng.random() < 0.3:
            self.write("evaluation_failed", step=step, version=version, tries=1, error="lost")
            return {}
        return self.evaluate(step, version, fails=False)

    # -- the queue ---------------------------------------------------------------------------------------------------

    def group(self, transition: str, ordinal: int) -> None:
        state = self.state
        _, attempt, version = state.groups[ordinal]
        now = {"attempt": attempt, "trainer_version": state.step, "version": state.version, "oldest_version": version}
        self.write("group", transition=transition, ordinal=ordinal, **now, detail="")

    def end(self, ordinal: int, end: str) -> None:
        self.group(end, ordinal)
        del self.state.groups[ordinal]
        self.state.counts[end] += 1

    def admit(self) -> None:
        state = self.state
        if len(state.groups) + state.counts["trained"] < STEPS * B and len(state.groups) < 3 * B:
            state.groups[state.next_ordinal] = ["running", 0, state.version]
            self.group("admitted", state.next_ordinal)
            state.next_ordinal += 1
            state.counts["admitted"] += 1

    def reissue(self) -> None:
        for ordinal in self.state.of("waiting"):
            group = self.state.groups[ordinal]
            group[0] = "running"
            group[2] = self.state.version if self.rng.random() < 0.7 else group[2]
            self.group("reissued", ordinal)

    def put(self) -> None:
        running = self.state.of("running")
        if running:
            ordinal = self.rng.choice(running)
            group = self.state.groups[ordinal]
            group[2] = self.rng.randint(group[2], self.state.version)
            if self.rng.random() < 0.15:
                self.end(ordinal, "filtered")
            else:
                group[0] = "ready"
                self.group("ready", ordinal)

    def fail(self) -> None:
        running = self.state.of("running")
        if running and self.rng.random() < 0.5:
            ordinal = self.rng.choice(running)
            if self.rng.random() < 0.3:
                self.end(ordinal, "failed")
            else:
                self.give_back(ordinal)

    def give_back(self, ordinal: int) -> None:
        group = self.state.groups[ordinal]
        group[:] = "waiting", group[1] + 1, min(group[2], self.state.version)
        self.group("requeued", ordinal)

    def expire(self) -> None:
        candidates = self.state.of("running", "ready")
        if candidates and self.rng.random() < 0.3:
            ordinal = self.rng.choice(candidates)
            attempt = self.state.groups[ordinal][1]
            self.end(ordinal, "expired")
            if self.rng.random() < 0.7:
                self.state.groups[ordinal] = ["waiting", attempt + 1, self.state.version]
                self.group("admitted", ordinal)
                self.state.counts["admitted"] += 1

    def expire_overdue(self) -> None:
        for ordinal in self.state.of("ready", "running"):
            if self.state.groups[ordinal][2] < self.state.step - self.limit:
                self.end(ordinal, "expired")

    def lease(self) -> None:
        state = self.state
        fit = [o for o in state.of("ready") if state.groups[o][2] >= state.step - self.limit or self.rng.random() < 0.1]
        if len(fit) >= B and not state.of("leased"):
            for ordinal in self.rng.sample(fit, B):
                group = state.groups[ordinal]
                oldest = max(0, state.step - self.limit)
                masked = self.rng.randint(oldest, max(oldest, state.version))
                version = group[2] if group[2] >= oldest else masked
                group[0], group[2] = "leased", version
                self.group("leased", ordinal)

    def commit(self) -> None:
        state = self.state
        leased = state.of("leased")
        if not leased or state.step >= STEPS:
            return
        if self.rng.random() < 0.1:
            for ordinal in leased:
                state.groups[ordinal][0] = "ready"
                self.group("released", ordinal)
            return
        lag_max = max(state.step - state.groups[o][2] for o in leased)
        self.sleep()
        self.write("step", step=state.step + 1, ordinals=leased, lag_max=lag_max)
        for ordinal in leased:
            self.end(ordinal, "trained")
        state.step += 1
        self.publish_step()
        self.scale()
        self.guard()
        line = {"step": state.step, "staleness/lag_max": lag_max}
        line |= {f"queue/{name}": count for name, count in state.all_counts().items()}
        if state.step == 1:
            if "eval/accuracy" in self.initial:
                line["eval/initial_accuracy"] = self.initial["eval/accuracy"]
            if "eval/failed" in self.initial:
                line["eval/failed"] = 1
        chance = self.rng.random()
        if chance < 0.3 and self.beside is None:
            line |= self.evaluate(state.step, self.published)
        elif chance < 0.8:
            line |= self.evaluate_beside()
        self.metrics[state.step] = line


# -- what it must hold -----------------------------------------------------------------------------------------------


def surviving(events: list[Event]) -> list[Event]:
    """What no restart undid."""
    kept: list[Event] = []
    queue = ""
    for event in events:
        if event["event"] in ("start", "training_restarted"):
            queue = ""
        elif event["event"] == "resume":
            queue = event["queue"]
        elif event["event"] in OF_QUEUE and event["writer"] != queue:
            continue  # of a queue that was given up
        fresh = event["event"] == "start" and not event["resumed"]
        if fresh or (event["event"] == "resume" and event["checkpoint"] is None):
            kept.clear()
        elif event["event"] == "restored":
            at = [i for i, e in enumerate(kept) if e["event"] == "snapshot" and e["snapshot"] == event["snapshot"]]
            assert at, "restored from nowhere"
            del kept[at[-1] + 1 :]
        kept.append(event)
    return kept


def broken_promise(events: list[Event]) -> str:
    """The three promises by brute force, without any knowledge of transitions; empty when they hold."""
    groups = [e for e in surviving(events) if e["event"] == "group"]
    ended: dict[int, list[str]] = defaultdict(list)
    admitted: Counter = Counter()
    steps: Counter = Counter()
    for e in groups:
        if e["transition"] == "admitted":
            admitted[e["ordinal"]] += 1
        if e["transition"] in ENDS:
            ended[e["ordinal"]].append(e["transition"])
        if e["transition"] == "trained":
            steps[e["trainer_version"]] += 1
            if e["trainer_version"] - e["oldest_version"] > MAX_LAG:
                return f"over the limit: {e}"
    if sorted(admitted) != list(range(len(admitted))):
        return "an ordinal was left out"
    for ordinal, count in admitted.items():
        ends = ended[ordinal]
        if len(ends) != count or any(end != "expired" for end in ends[:-1]):
            return f"ordinal {ordinal} was admitted {count} times and ended {ends}"
    if set(ended) - set(admitted) or steps != Counter(dict.fromkeys(range(STEPS), B)):
        return f"steps trained {steps}"
    return ""


# -- damage ----------------------------------------------------------------------------------------------------------


def edits(value: Any) -> Iterator[Any]:
    """Other values of the same form, and one of another."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, *([value - 1] if value else []))
    elif isinstance(value, float):
        yield from (value / 2 + 0.01, value + 0.3)
    elif isinstance(value, str):
        yield value + "x"
    elif isinstance(value, list):
        yield value[:-1]
        for i, held in enumerate(value):
            for other in edits(held):
                yield [*value[:i], other, *value[i + 1 :]]
    elif isinstance(value, dict):
        for name, held in value.items():
            for other in edits(held):
                yield {**value, name: other}
    else:
        yield "step_1"


def mutations(events: list[Event], at: int) -> Iterator[tuple[str, list[Event]]]:
    """Name -> the events with what was done to the one at `at`."""
    it = events[at]
    yield "deleted", events[:at] + events[at + 1 :]
    yield "doubled", [*events[: at + 1], *events[at:]]
    if at + 1 < len(events):
        yield "exchanged", [*events[:at], events[at + 1], it, *events[at + 2 :]]
    for name, value in it.items():
        if name in ("event", "time_s", "monotonic_s", "writer", "at", "chain"):
            continue
        for other in edits(value):
            yield name, [*events[:at], {**it, name: other}, *events[at + 1 :]]


# -- files -----------------------------------------------------------------------------------------------------------


def sealed(lines: Iterable[Event | bytes]) -> bytes:
    """The file that one writer makes of these events; bytes go in as they are."""
    log = b""
    for line in lines:
        if isinstance(line, bytes):
            log += line
            continue
        body = json.dumps({**line, "writer": line.get("writer", "one"), "at": len(log)})[:-1].encode()
        chain = hashlib.blake2b(log + body, digest_size=16).hexdigest()
        log += body + f', "chain": "{chain}"}}\n'.encode()
    return log


def edited(event: Event, line: bytes) -> bytes:
    """`event` with the hash of the line that it was."""
    return sealed([event]).partition(b', "writer"')[0] + b', "writer"' + line.partition(b', "writer"')[2]


def replay(events: list[Event]) -> Audit:
    """The audit of a log whose hashes are those of `events` as they are now."""
    audit = Audit(LIMITS)
    for number, event in enumerate(events, 1):
        audit.feed(number, event)
    audit.close()
    return audit
