"""`asyncrl-plan`: costs from the files of a run, its table, its errors, and the short run of a probe."""

import json
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from asyncrl.commands.plan import combinations, main, probe
from asyncrl.errors import ConfigError, RunFailed
from asyncrl.plan import read_costs, write_costs
from asyncrl.plan.costs import CostModel, GenerationCosts, LengthCosts, PublishCosts, TrainingCosts
from asyncrl.plan.fit import Traced, costs_of_run, measured, uncontended
from asyncrl.plan.simulation import Simulation
from asyncrl.report.run_files import read_run, read_spans
from asyncrl.types.metrics import Metric
from tests.make import QUICKSTART, ROOT, planned, quickstart

STEPS, START, STEP_S = 20, 1_700_000_000.0, 2.0
LATENCY_S, TOKEN_S, SHARED_S, REST_S = 0.05, 0.004, 0.0002, 0.3
PAUSE_S = 0.2
CHECKED_S = {Metric.CPU_QUEUE: 0.25, Metric.CPU_ROLLOUTER: 1.0, Metric.CPU_WORKERS: 0.5}
"""CPU seconds between two health checks."""


@pytest.fixture
def run_directory(tmp_path):
    """A run whose costs are known: `STEPS` steps; phases in which so many requests share replica 0, with a publish
    inside every other one."""
    directory = tmp_path / "made"
    directory.mkdir()
    recipe = asdict(quickstart("observability.trace_every_groups=1"))
    (directory / "config.json").write_text(json.dumps({"name": "made", "recipe": recipe}))
    tokens = [10_000 + 500 * (step % 5) for step in range(STEPS)]
    trained = [0.25 + 2e-5 * n for n in tokens]
    lines = [
        {
            Metric.STEP: step + 1,
            Metric.TIME: 10 + STEP_S * step,
            Metric.TRAIN_TIME: trained[step],
            Metric.TRAIN_SPEED: tokens[step] / trained[step],
            Metric.RESPONSE_TOKENS: 30.0,
            Metric.TRAINER_PLANNING: 0.02,
            Metric.TRAINER_CHECKPOINT: 0.005,
            Metric.FILTERED_SHARE: 0.25,
            Metric.IDLE_TRAINER: 0.4,
            Metric.IDLE_ROLLOUT: 0.1,
            Metric.LAG_MEAN: 1.5,
            Metric.LAG_MAX: 2,
            Metric.PUBLISH_TIME: 0.3,
            Metric.PUBLISH_PAUSE: PAUSE_S,
            Metric.MASKED_TOKENS: 0.0,
            Metric.ROLLOUT_SPEED: 5000.0,
            Metric.TRAINER_EVALUATION: 0.5 if step == STEPS - 1 else 0.0,
            Metric.CPU_COORDINATOR: 3.0 + 0.05 * step,
            # The others are told by health checks, every third step.
            **({} if step < 3 else {name: 1.0 + s * (step // 3) for name, s in CHECKED_S.items()}),
        }
        for step in range(STEPS)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events, groups, now = [], [], START
    for number in range(24):
        together, length = 1 + 5 * (number % 4), 20 + 7 * (number % 3)
        publishes = number % 2
        stop = now + LATENCY_S + length * (TOKEN_S + SHARED_S * together) + PAUSE_S * publishes
        if publishes:
            done = now + PAUSE_S + 0.01
            publish = {"version": number, "publish_s": 0.3, "pause_s": PAUSE_S, "transfer_s": 0.1, "bytes": 1000}
            publish |= {"verified": False, "attempts": 1, "replicas": 1}
            events.append({"event": "publish", "time_s": done} | publish)
        made = [["request", now, stop, {"replica": 0, "tokens": length}], ["trajectory", now, stop + REST_S, {}]]
        groups.append({"ordinal": number, "attempt": 0, "trajectories": [made] * together})
        now = stop + 1.0
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (directory / "spans.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    return directory


def fitted(directory: Path, cores: float | None = None) -> CostModel:
    run = read_run(directory)
    return costs_of_run(run, Traced.of(read_spans(run)), quickstart(), cores)


def test_the_costs_of_a_run_are_found_again(run_directory):
    costs = fitted(run_directory)
    generation, training, publish = costs.generation, costs.training, costs.publish
    assert [n for n, _ in generation.decode_step_s] == [1, 16]
    assert [s for _, s in generation.decode_step_s] == pytest.approx(
        [TOKEN_S + SHARED_S, TOKEN_S + 16 * SHARED_S], rel=0.01
    )
    assert generation.latency_s == pytest.approx(LATENCY_S, rel=0.05)
    assert (training.step_s, training.token_s) == pytest.approx((0.25, 2e-5))
    assert generation.prompt_tokens == pytest.approx(11_000 / 256 - 30, rel=0.02)
    assert (publish.bytes, publish.bytes_per_s) == pytest.approx((1000, 10_000))
    assert (publish.fixed_s, publish.running_s) == pytest.approx((0.2, 0.1))
    assert costs.reward_s == pytest.approx(REST_S)
    assert costs.loop_s == pytest.approx(0.025 * STEP_S)
    assert costs.filtered_share == 0.25
    assert costs.rollouter_s == pytest.approx(1.0 / 3 / 256)
    assert costs.beside_s == pytest.approx((0.05 + (0.25 + 0.5) / 3) / 256)
    assert generation.lengths.quantiles[0] == 20
    assert generation.lengths.quantiles[-1] == 34


def test_counted_decode_steps_say_what_a_step_costs_beside_its_tokens(run_directory):
    """Of two replicas, a quarter busy or less: S steps with N tokens take S a + N d."""
    own_s, token_s, replicas = 0.002, 3e-5, 2
    lines = []
    for number, text in enumerate((run_directory / "metrics.jsonl").read_text().splitlines()):
        steps, tokens = 100 + 7 * (number % 5), 8000 + 100 * (number % 3)
        busy_s = steps * own_s + tokens * token_s
        counted = {
            Metric.DECODE_BATCH: tokens / steps,
            Metric.ROLLOUT_SPEED: tokens / STEP_S,
            Metric.IDLE_ROLLOUT: 1 - busy_s / STEP_S / replicas,
        }
        lines.append(json.dumps(json.loads(text) | counted))
    (run_directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = fitted(run_directory).generation
    assert [s for _, s in found.decode_step_s] == pytest.approx([own_s + token_s, own_s + 16 * token_s])
    assert found.latency_s == pytest.approx(LATENCY_S, rel=0.05)


def test_the_cpu_time_of_a_process_that_was_replaced_goes_on_from_nothing(run_directory):
    path = run_directory / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines[12:]:
        line[Metric.CPU_ROLLOUTER] -= 4.5  # one check's worth is lost, and no more
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert 0.5 / 3 / 256 < fitted(run_directory).rollouter_s < 1.0 / 3 / 256


def test_what_a_run_came_to_leaves_evaluations_out(run_directory):
    found = measured(read_run(run_directory))
    assert found.step_s == pytest.approx((15 * STEP_S - 1.0) / 15)
    assert found.samples_per_s == pytest.approx(256 / found.step_s)
    assert (found.trainer_idle, found.replica_idle) == pytest.approx((0.4, 0.1))
    assert (found.lag_mean, found.lag_max, found.publish_s) == pytest.approx((1.5, 2, 0.3))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda d: (d / "spans.jsonl").unlink(), "spans.jsonl has 0 requests"),
        (lambda d: (d / "events.jsonl").write_text(""), "events.jsonl has none"),
        (lambda d: (d / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0}\n'), "1 optimizer steps"),
    ],
)
def test_a_run_without_the_costs_says_what_is_missing(run_directory, damage, found):
    damage(run_directory)
    with pytest.raises(ConfigError, match=r"(?s)asked:.*do:") as raised:
        fitted(run_directory)
    assert found in str(raised.value)


def test_the_slowdown_by_shared_cores_is_taken_out():
    """A run on one core, as it would be measured: the costs come out as if each process had a core."""
    recipe = planned("batch.groups_per_step=8", "batch.group_size=4", "rollout.num_replicas=2", "trainer.num_threads=1")
    alone = CostModel(
        source="",
        generation=GenerationCosts(
            decode_step_s=((1, 0.01), (32, 0.03)), prompt_tokens=0, lengths=LengthCosts(quantiles=(40, 60))
        ),
        training=TrainingCosts(token_s=2e-4, step_s=0.5),
        publish=PublishCosts(bytes=0, bytes_per_s=1, fixed_s=0.1),
        cores=1.5,
    )
    steps = Simulation(recipe, alone).run(80)
    late = steps[20:]
    wall, busy = late[-1].ended - steps[19].ended, late[-1].busy_s - steps[19].busy_s
    line = {
        Metric.TRAIN_TIME: fmean(step.trained - step.leased for step in late),
        Metric.IDLE_ROLLOUT: 1 - busy / wall / 2,
        Metric.ROLLOUT_SPEED: sum(step.tokens for step in late) / wall,
    }
    slow = replace(
        alone,
        generation=replace(alone.generation, decode_step_s=((1, 0.017), (32, 0.051))),
        training=replace(alone.training, token_s=3e-4, step_s=0.75),
    )
    found = uncontended(slow, [line], recipe)
    assert found.training.token_s == pytest.approx(2e-4, rel=0.05)
    assert found.generation.decode_step_s[0][1] == pytest.approx(0.01, rel=0.05)


# -- the command -------------------------------------------------------------------------------------------------------


def test_each_combination_is_a_row(run_directory, tmp_path, capsys):
    written = tmp_path / "costs.yaml"
    words = [str(QUICKSTART), "--from-run", str(run_directory), "--cores", "0", "--steps", "6", "--write", str(written)]
    words += ["--vary", "mode=sync,fully_async", "--vary", "rollout.num_replicas=1,2", "--json", "run.max_steps=50"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["settings"] for row in rows] == [
        {"measured": "made"},
        *({"mode": m, "rollout.num_replicas": r} for m in ("sync", "fully_async") for r in ("1", "2")),
    ]
    assert [row["forecast"]["lag_max"] for row in rows[1:]] == [0, 0, 2, 2]
    assert main([str(QUICKSTART), "--costs", str(written), "--steps", "6"]) == 0
    shown = capsys.readouterr().out
    assert "step s" in shown
    assert "masked" not in shown


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--vary", "rollout.num_replicas"], "not of the form key=a,b,c"),
        (["--vary", "mode=sync", "--vary", "mode=fully_async"], "the key was given before"),
        (["--vary", "rollout.replicas=1,2"], "there is no such key"),
        (["--steps", "2"], "too few to measure anything"),
        (["--vary", "run.seed=" + ",".join(map(str, range(401)))], "at most 400"),
    ],
)
def test_bad_input_says_what_to_do(words, found, tmp_path, capsys):
    costs = ROOT / "benchmarks" / "plans" / "verl_qwen2.5_math_7b_h20.yaml"
    assert main([str(QUICKSTART), "--costs", str(costs), *words]) == 2
    said = capsys.readouterr().err
    assert found in said
    assert "do:" in said


def test_a_file_that_is_no_cost_model_is_refused(tmp_path, capsys):
    assert main([str(QUICKSTART), "--costs", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_committed_cost_models_are_read():
    for file in (ROOT / "benchmarks" / "plans").glob("*.yaml"):
        costs = read_costs(file.read_text(), str(file))
        assert read_costs(write_costs(costs), "written") == costs


def test_without_keys_there_is_one_combination():
    assert combinations([]) == [{}]
    assert combinations(["a=1,2", "b=3"]) == [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]


# -- the probe ---------------------------------------------------------------------------------------------------------

TRAINS = """
    import pathlib, signal, sys, time
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    assert words["mode"] == "sync" and words["observability.trace_every_groups"] == "1", words
    directory = pathlib.Path(words["run.dir"])
    directory.mkdir()
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    for step in range(10_000):
        with (directory / "metrics.jsonl").open("a") as file:
            file.write("{}\\n")
        time.sleep(0.001)
        if asked:
            sys.exit(130)
"""


def test_a_probe_ends_the_run_when_it_has_enough_steps(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(TRAINS)]
    probe(QUICKSTART, [], tmp_path / "probe", Console(quiet=True), program)
    assert 16 <= len((tmp_path / "probe" / "metrics.jsonl").read_text().splitlines()) < 10_000


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (5, RunFailed)])
def test_a_probe_that_fails_says_why(tmp_path, code, error):
    program = [sys.executable, "-c", f"import sys; print('a replica is lost'); sys.exit({code})"]
    with pytest.raises(error, match="a replica is lost"):
        probe(QUICKSTART, [], tmp_path / "probe", Console(quiet=True), program)
