"""Checkpoints that are converted from FSDP2 to Megatron-core and back: the run goes on as if nothing had happened."""

import json
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from asyncrl.checkpoint.digests import verify
from asyncrl.checkpoint.store import CheckpointStore, RunState, read_state
from asyncrl.commands.export import main
from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import LoraConfig, MegatronConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backend import MOMENTS, WEIGHT
from asyncrl.trainer.backends import open_training_state, require_written_by, write_training_state
from asyncrl_testing.backend_suite import random_lease, weights_of
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import fsdp_backend, megatron_backend, save
from tests.contract.test_export import write_tokenizer
from tests.make import needs_megatron
from tests.numerics.test_fsdp_ranks import assert_close_metrics
from tests.numerics.test_megatron_layouts import BUDGET, DEADLINE_S, spec_of, write_models

pytestmark = [needs_megatron, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

LEASES = [random_lease(40 + step, step=step) for step in range(4)]
PPO = {"advantage": "gae", "critic": CriticConfig(lr=1e-3)}
RUNS = {
    "qwen3": (PPO, MegatronConfig(tensor_parallel=2), ("model", "critic")),
    "mixture": ({}, MegatronConfig(pipeline_parallel=2), ("model",)),
}
"""Kind of model -> algorithm, layout on two ranks, models of a checkpoint."""


def make_fsdp(path, **algorithm):
    return fsdp_backend(spec_of(path, 1, "fsdp", **algorithm))


def step(backend, number, layout=None, rank=0):
    lease, (plans, own) = LEASES[number], (layout.num_plans, layout.plan_of(rank)) if layout else (1, 0)
    return asdict(backend.train_step(lease.plans(plans, BUDGET)[own], lease.trajectories))


def rank_main(root, rank, world_size, models):
    """Loads what was converted from FSDP2, saves it, and trains on. `models`: kind -> (model, converted checkpoint)."""
    from megatron.core import parallel_state

    found = {}
    for kind, (path, converted) in models.items():
        algorithm, layout, _ = RUNS[kind]
        spec = spec_of(path, world_size, "megatron", layout, **algorithm)
        backend = megatron_backend(spec, rank, world_size)
        backend.load(converted)
        loaded = weights_of(backend)
        save(backend, root / kind / "loaded")
        metrics = step(backend, 2, spec.trainer.layout, rank)
        save(backend, root / kind / "trained")
        found[kind] = {
            "loaded": loaded,
            "metrics": metrics,
            "weights": weights_of(backend),
            "next": step(backend, 3, spec.trainer.layout, rank),
        }
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    written = write_models(tmp_path_factory.mktemp("models"), RUNS)
    for path in written.values():
        write_tokenizer(path)
    return written


def configs_of(path, names):
    return dict.fromkeys(names, AutoConfig.from_pretrained(path).to_dict())


def converted(directory, to, out, configs):
    write_training_state(to, out, open_training_state(directory, configs.__getitem__), configs)
    return out


@pytest.fixture(scope="module")
def outcomes(paths, tmp_path_factory, process_group):
    """Kind -> what FSDP2 found, what the ranks found after it, the directories of all checkpoints."""
    root, fsdp, models, configs = tmp_path_factory.mktemp("converted"), {}, {}, {}
    for kind, (algorithm, _, names) in RUNS.items():
        backend = make_fsdp(paths[kind], **algorithm)
        for number in range(2):
            step(backend, number)
        written = save(backend, root / kind / "fsdp")
        fsdp[kind] = {"written": weights_of(backend), "metrics": step(backend, 2), "weights": weights_of(backend)}
        configs[kind] = configs_of(paths[kind], names)
        models[kind] = paths[kind], converted(written, "megatron", root / kind / "converted", configs[kind])
    ranks = run_ranks(
        rank_main, root / "ranks", 2, models, preload=["tests.numerics.megatron_ranks"], deadline_s=DEADLINE_S
    )
    found = {}
    for kind in RUNS:
        places = {name: root / kind / name for name in ("fsdp", "converted", "back")}
        places |= {name: root / "ranks" / kind / name for name in ("loaded", "trained")}
        converted(places["trained"], "fsdp", places["back"], configs[kind])
        found[kind] = fsdp[kind], [rank[kind] for rank in ranks], places
    return found


@pytest.fixture(params=list(RUNS))
def outcome(request, outcomes):
    return request.param, *outcomes[request.param]


@cache
def state_of(directory, names, path):
    """(length of the run, model -> steps, (model, name, kind) -> tensor)."""
    state = open_training_state(directory, configs_of(path, names).__getitem__)
    tensors = {
        (model, name, kind): state.read(model, name, kind)
        for model in names
        for name in state.shapes(model)
        for kind in (WEIGHT, *MOMENTS)
    }
    assert all(tuple(t.shape) == state.shapes(model)[name] for (model, name, _), t in tensors.items())
    return state.total_steps(), {model: state.steps(model) for model in names}, tensors


def assert_same_state(a, b, names, path):
    """Bitwise, moments and numbers of steps included."""
    (length, steps, one), (other_length, other_steps, other) = state_of(a, names, path), state_of(b, names, path)
    assert length == other_length
    assert steps == other_steps
    assert min(steps.values()) > 0
    assert set(one) == set(other)
    for key, tensor in one.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, other[key]), key
        assert tensor.any() or key[2] == WEIGHT, "it was trained"


def of_all_stages(ranks, what):
    """Each rank has the tensors that its pipeline stage sends."""
    return {name: tensor for rank in ranks for name, tensor in rank[what].items()}


def test_nothing_is_lost_on_the_way_to_megatron_and_back(outcome, paths):
    kind, fsdp, ranks, places = outcome
    names = RUNS[kind][2]
    assert_same_state(places["fsdp"], places["converted"], names, paths[kind])
    assert_same_state(places["converted"], places["loaded"], names, paths[kind])
    assert_same_state(places["trained"], places["back"], names, paths[kind])
    loaded = of_all_stages(ranks, "loaded")
    assert all(np.array_equal(loaded[name], weight) for name, weight in fsdp["written"].items())


def test_the_next_step_is_that_of_the_backend_that_it_came_from(outcome, paths):
    kind, fsdp, ranks, places = outcome
    again = make_fsdp(paths[kind], **RUNS[kind][0])
    again.load(places["back"])
    pairs = [(rank["metrics"], fsdp["metrics"]) for rank in ranks]
    pairs.append((step(again, 3), ranks[0]["next"]))
    for found, expected in pairs:
        assert expected["grad_norm"] > 0.1
        assert_close_metrics(expected, found, rel=5e-5, floor=5e-6)
    weights = of_all_stages(ranks, "weights")
    for name, weight in fsdp["weights"].items():
        difference = np.abs(weights[name] - weight)
        assert np.mean(difference > 2e-5) < 0.01, name


@pytest.fixture
def run(outcomes, paths, tmp_path):
    """A run whose checkpoint FSDP2 wrote."""
    directory = tmp_path / "run"
    store = CheckpointStore(directory / "checkpoints", keep=2)
    temporary = store.begin(2)
    (temporary / "trainer").symlink_to(outcomes["qwen3"][2]["fsdp"])
    (temporary / "queue").mkdir()
    (temporary / "queue" / "ledger.json").write_text("kept")
    store.finish(temporary, RunState(2, 7.5, 4, 3, 1, 0, True, "digest"))
    recipe = {"model": asdict(ModelConfig(path=str(paths["qwen3"]))), "trainer": {"backend": "fsdp", "lr": 0.5}}
    (directory / "config.json").write_text(json.dumps({"name": "run", "recipe": recipe}))
    (directory / "events.jsonl").write_text("history\n")
    return directory


def test_the_command_makes_a_run_that_goes_on_where_it_was(run, paths, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"asyncrl-export .*/step_2 NEW_RUN --to megatron"):
        require_written_by("megatron", run / "checkpoints/step_2/trainer")
    out = tmp_path / "new"
    assert main([str(run), str(out), "--to", "megatron"]) == 0
    said = capsys.readouterr().out
    assert "fsdp to megatron: model and critic with both moments; random states start as in a new run" in said
    assert f"trainer.backend=megatron run.dir={out} resume=auto" in said.replace("\n", "")
    checkpoint = CheckpointStore(out / "checkpoints", keep=1).latest()
    assert checkpoint is not None
    assert checkpoint.name == "step_2"
    assert verify(checkpoint) is None
    require_written_by("megatron", checkpoint / "trainer")
    assert read_state(checkpoint) == read_state(run / "checkpoints/step_2")
    assert (checkpoint / "queue/ledger.json").read_text() == "kept"
    assert (out / "events.jsonl").read_text() == "history\n"
    recipe = json.loads((out / "config.json").read_text())["recipe"]
    assert recipe["trainer"] == {"backend": "megatron", "lr": 0.5}
    record = json.loads((checkpoint / "converted.json").read_text())
    assert (record["from"], record["to"]) == ("fsdp", "megatron")
    back = tmp_path / "back"
    assert main([str(out), str(back), "--to", "fsdp"]) == 0
    names = ("model", "critic")
    same = run / "checkpoints/step_2/trainer", back / "checkpoints/step_2/trainer"
    assert_same_state(*same, names, paths["qwen3"])
    assert main([str(out), str(tmp_path / "hf"), "--dtype", "float32"]) == 0, "the run's config names its backend"


def test_large_checkpoints_are_written_in_files_of_a_limited_size(outcomes, paths, tmp_path):
    from asyncrl.trainer.megatron.training_state import write_training_state as write

    _, _, places = outcomes["mixture"]
    configs = configs_of(paths["mixture"], ("model",))
    write(tmp_path / "small", open_training_state(places["fsdp"], configs.__getitem__), configs, max_file_bytes=20_000)
    assert len(list((tmp_path / "small").iterdir())) > 10
    assert_same_state(places["fsdp"], tmp_path / "small", ("model",), paths["mixture"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--to", "fsdp"], "it is of that backend"),
        (["--to", "megatron", "--adapter"], "leave one of them out"),
        (["--to", "megatron", "--dtype", "bfloat16"], "leave one of them out"),
    ],
)
def test_what_cannot_be_converted_is_refused(run, tmp_path, capsys, words, match):
    assert main([str(run), str(tmp_path / "new"), *words]) == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_model_that_was_not_trained_is_refused(run, tmp_path, capsys):
    from transformers import Qwen3Config

    Qwen3Config(vocab_size=99, hidden_size=32).save_pretrained(tmp_path / "other")
    assert main([str(run), str(tmp_path / "new"), "--to", "megatron", "--model", str(tmp_path / "other")]) == 2
    assert "pass --model DIRECTORY, the model that was trained" in capsys.readouterr().err


def test_adapters_are_not_converted(paths, tmp_path, process_group):
    spec = spec_of(paths["qwen3"], 1, "fsdp")
    spec = replace(spec, trainer=replace(spec.trainer, lora=LoraConfig(rank=2)))
    save(fsdp_backend(spec), tmp_path / "trainer")
    with pytest.raises(ConfigError, match="adapters alone"):
        open_training_state(tmp_path / "trainer", {}.__getitem__)
