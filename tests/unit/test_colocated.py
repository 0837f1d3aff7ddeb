"""What a recipe may ask for with placement=colocated, and what follows from it elsewhere."""

import pytest

from asyncrl.config.threads import trainer_threads
from asyncrl.driver import preflight
from asyncrl.driver.cluster.placement import SHARE_IN_TURNS, place_run
from asyncrl.errors import ConfigError
from asyncrl.inference.engines import ENGINES, require_sleep
from asyncrl.plan.simulation import check_modelled
from asyncrl.rollout.replica_time import ReplicaUse
from tests.make import quickstart
from tests.unit.test_preflight import checked  # noqa: F401 - a fixture

SHORT = ("trainer.step_timeout_s=60", "weights.publish_timeout_s=60")


def colocated(*overrides, mode="sync"):
    return quickstart("placement=colocated", f"mode={mode}", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mode=fully_async",), r"in mode fully_async(?s:.*)mode=sync or mode=one_step_off"),
        (("mode=one_step_off", "staleness.publish_every_steps=2", *SHORT), r"publish_every_steps=2(?s:.*)drop their"),
        (("eval.leased_replicas=1",), r"eval\.leased_replicas=1(?s:.*)awake while the trainer"),
        (("weights.overlap=true",), r"weights\.overlap=true(?s:.*)all engines wake for it"),
        (("weights.stage=true",), r"weights\.stage=true"),
        (("weights.rolling=true",), r"weights\.rolling=true"),
        (("weights.encoding=delta",), r"weights\.encoding=delta(?s:.*)drop the weights"),
        (("trainer.device=cuda", "weights.transport=collective"), r"transport=collective(?s:.*)NCCL connects no two"),
        (("rollout.engine=vllm", "rollout.vllm.tensor_parallel_size=2"), r"vllm\.tensor_parallel_size=2"),
        (("mode=one_step_off",), r"rollout\.gate_timeout_s=300(?s:.*)= 3900(?s:.*)at least 3900"),
        (
            ("mode=one_step_off", "rollout.gate_timeout_s=3900", "rollout.request_timeout_s=1800"),
            r"rollout\.request_timeout_s=1800",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=rf"placement=colocated(?s:.*){message}"):
        colocated(*overrides)


def test_separate_is_the_default_and_changes_nothing():
    recipe = quickstart("mode=one_step_off", "rollout.engine=vllm")
    assert not recipe.is_colocated
    assert (recipe.empties_queue, recipe.interrupt) == (True, "drain")
    assert not recipe.rollout.vllm.enable_sleep_mode


def test_one_step_off_goes_on_with_what_a_step_did_not_need():
    recipe = colocated(*SHORT, mode="one_step_off")
    assert (recipe.max_lag, recipe.empties_queue, recipe.interrupt) == (1, False, "abort_resume")
    sync = colocated()
    assert (sync.max_lag, sync.empties_queue, sync.interrupt) == (0, True, "drain")


def test_engines_get_the_setting_that_lets_them_sleep():
    assert colocated("rollout.engine=vllm").rollout.vllm.enable_sleep_mode
    assert colocated("rollout.engine=sglang").rollout.sglang.enable_memory_saver
    assert not colocated("rollout.engine=vllm").rollout.sglang.enable_memory_saver


def test_ranks_compute_with_all_cores_in_their_turn():
    separate = quickstart("mode=one_step_off", *SHORT)
    beside, alone = (trainer_threads(recipe, cores=8) for recipe in (separate, colocated(*SHORT, mode="one_step_off")))
    assert alone * separate.trainer.num_ranks == 8
    assert beside < alone


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_sleep_on_gpus_only_are_refused_on_a_cpu(engine):
    with pytest.raises(ConfigError, match=rf"rollout\.engine={engine} on a CPU(?s:.*)rollout\.engine=torch"):
        require_sleep(engine)
    require_sleep("torch")
    assert not place_run(colocated(f"rollout.engine={engine}"), []).shares_gpus, "then the run asks this"
    assert not place_run(colocated(f"rollout.engine={engine}", "trainer.device=cpu"), [8]).shares_gpus


@pytest.mark.parametrize(("is_cpu", "device"), [(True, "auto"), (False, "cpu")])
def test_the_preflight_finds_a_cpu_engine_that_cannot_sleep(checked, monkeypatch, is_cpu, device):  # noqa: F811
    monkeypatch.setattr(preflight, "_is_cpu_build", lambda: is_cpu)
    with pytest.raises(ConfigError, match=r"placement=colocated with rollout\.engine=sglang on a CPU"):
        checked("mode=sync", "placement=colocated", "rollout.engine=sglang", f"trainer.device={device}")


def test_a_dry_run_says_that_the_phases_alternate(checked):  # noqa: F811
    lines = checked("mode=sync", "placement=colocated")
    assert "placement colocated, in turns: generate a step's groups, sleep, train, publish and wake" in lines
    assert not [line for line in checked("mode=sync") if line.startswith("placement")]
    assert set(preflight.TURNS) == {"sync", "one_step_off"}


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_each_replica_takes_turns_with_a_rank_on_a_gpu_of_their_own(engine):
    found = place_run(
        colocated(f"rollout.engine={engine}", "trainer.num_ranks=2", "rollout.num_replicas=2", "weights.transport=ipc"),
        [8],
    )
    assert (found.replica_gpus, found.rank_gpus, found.shares_gpus) == (SHARE_IN_TURNS, 1 - SHARE_IN_TURNS, True)
    assert [(b.gpus, b.replicas, b.num_ranks) for b in found.bundles] == [(1, (0,), 1), (1, (1,), 1)]


def test_turns_on_a_gpu_take_neither_nccl_nor_more_gpus_than_there_are():
    with pytest.raises(ConfigError, match=r"weights\.transport=collective(?s:.*)NCCL refuses two processes"):
        place_run(colocated("weights.transport=collective"), [8])
    with pytest.raises(ConfigError, match="2 of 3"):
        place_run(colocated("trainer.num_ranks=1", "rollout.num_replicas=3", "weights.transport=ipc"), [2])
    assert place_run(colocated(), []).replica_gpus == 0


def test_the_planner_knows_the_turns_of_sync_only():
    check_modelled(colocated())
    with pytest.raises(ConfigError, match="forecast of placement=colocated in mode one_step_off"):
        check_modelled(colocated(*SHORT, mode="one_step_off"))


def test_every_engine_says_whether_it_sleeps_on_a_cpu():
    assert {name for name, spec in ENGINES.items() if spec.sleeps_on_cpu} == {"torch"}


def test_a_sleeping_replica_has_a_cause_of_its_own():
    use = ReplicaUse(serving=1, busy=1, asleep=2, absent=1)
    assert {cause: count for cause, count in use.replicas.items() if count} == {
        "generating": 1,
        "asleep": 2,
        "recovering": 1,
    }
