"""Checks everything that can be wrong with a recipe before any process starts."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING

from asyncrl.chat.server import bind, is_local
from asyncrl.config.checks import has_nvidia_gpu
from asyncrl.config.load import Loaded
from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import is_generator, is_hub_model, is_place, require_mounted
from asyncrl.config.recipe import Recipe, trains_branches
from asyncrl.config.serving import ServeSection, check_key
from asyncrl.config.threads import local_cores, replica_threads, trainer_threads
from asyncrl.config.trainer import TrainerConfig
from asyncrl.data.chat_template import THINKING_SWITCHES, ChatTemplate
from asyncrl.data.dataset import load_rows
from asyncrl.data.model_files import cached_facts, check_model, hub_facts
from asyncrl.data.row_table import RenderedPrompts
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import (
    PromptRenderer,
    load_tokenizer,
    render_rows,
    stop_token_ids,
    vocabulary,
)
from asyncrl.data.tool_calls import parser_for, shown, template_text, tools_for
from asyncrl.data.training_set import TrainingSet, sources_of, training_prompts
from asyncrl.driver.cluster.placement import Demand, describe_demand, joined_address
from asyncrl.driver.memory_plan import (
    check_memory_fits,
    computes_here,
    gpu_bytes,
    trainer_plan,
    with_fitting_microbatch,
    with_fitting_places,
    with_fitting_recompute,
    with_fitting_share,
)
from asyncrl.environments import check_environment, prompt_tools
from asyncrl.errors import ConfigError, explain
from asyncrl.inference import engines
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.rewards import build_reward, check_rows
from asyncrl.rewards.group import build_group_reward
from asyncrl.rewards.math import asks_for_mark
from asyncrl.trainer.backends import require_backend, require_fits, require_trains
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.types import ModelFacts
from asyncrl.weights.object_store import check_store, is_url
from asyncrl.workers.sandbox import require_protection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TURNS = {
    "sync": "generate a step's groups, sleep, train, publish and wake",
    "one_step_off": "generate until a step has its groups, sleep, train, publish and wake; the other groups, up to as "
    "many again, go on under the new weights",
}
"""Mode -> the repeating phases of a colocated run."""
PLACES = {"torch": "num_slots", "vllm": "max_num_seqs", "sglang": "max_running_requests"}
"""Engine -> the setting for the number of requests that a replica decodes concurrently."""


_UNDIGESTED = "rollout.remote.weights=native: no server digests its weights; staleness.parity judges every step instead"
_SMALLEST = 50_000_000
"""Parameters of the smallest model for which there is a usual learning rate."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Findings of the preflight. `facts`: of the policy's model. `train` and `held_out`: the prompts; None while only a
    hub name is known. `notes`: what could not be checked, and what a user may have overlooked."""

    facts: ModelFacts
    train: TrainingSet | None
    held_out: dict[str, RenderedPrompts | None]
    notes: tuple[str, ...]


def check_recipe(recipe: Recipe, *, use_hub: bool, trains: bool = True) -> Preflight:
    """Reads model files, tokenizer and every row of every dataset, and has the built-in rewards look at each row.
    Starts only an empty program in the sandbox of the policy's programs, and MCP servers to list their tools.

    Args:
        use_hub: look hub names up, which downloads tokenizer and data; False leaves them unchecked, with a note.
        trains: False skips the training data.

    Raises ConfigError, DataError naming the key, file or row.
    """
    # Checks that need no model first: they fail fastest.
    _check_places(recipe, trains=trains)
    check_environment(recipe)
    build_reward(recipe.reward)
    build_group_reward(recipe.reward.group)
    facts = check_model(recipe.model.path)
    notes: list[str] = []
    renderer = None
    # A hub model is checked below, once its facts are known.
    if facts.is_local or not use_hub:
        _check_processes(recipe, facts, trains=trains, plans=not use_hub)
    sampling = recipe.rollout.sampling
    if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.keep_sets:
        notes.append("top_p and top_k filter what replicas sample but not what the trainer computes: ratios are biased")
    notes += [_UNDIGESTED] * recipe.rollout.is_native
    if facts.is_local or use_hub:
        tokenizer = load_tokenizer(recipe.model)
        if not facts.is_local:
            facts = hub_facts(recipe.model)
            _check_processes(recipe, facts, trains=trains, plans=not use_hub)
        notes += [f"model.path: trained without {', '.join(facts.noise)}, as it is sampled"] * bool(facts.noise)
        tools, parser = prompt_tools(recipe, tokenizer), recipe.rollout.tool_use.parser
        continues = recipe.data.continue_final_message
        renderer = PromptRenderer(tokenizer, recipe.model, tools, parser=parser, continues=continues)
        notes += [*_end_notes(recipe, tokenizer, renderer), *_parser_notes(recipe, tokenizer)]
        notes += _thinking_notes(recipe.model, renderer.template, "model")
        notes += _check_other_models(recipe, tokenizer, use_hub=use_hub)
        notes += _check_pools(recipe, tokenizer, use_hub=use_hub) if trains else []
    else:
        notes.append(f"model {recipe.model.path} comes from the hub: it is looked up when the run starts")
        if cached := cached_facts(recipe.model):
            facts = cached
            _check_processes(recipe, facts, trains=trains, plans=not use_hub)

    def may_read(source: str) -> bool:
        if use_hub or is_place(source) or is_generator(source):
            return True
        notes.append(f"dataset {source} comes from the hub: it is looked up when the run starts")
        return False

    def held_out_prompts(source: str) -> RenderedPrompts | None:
        if not may_read(source):
            return None
        data = recipe.data
        rows = load_rows(source, data.schema, data.system_prompt, data.image_directory)[: recipe.eval.max_prompts]
        check_rows(recipe.reward, rows)
        if renderer is None:
            return None
        return render_rows(rows, renderer, recipe.data.max_prompt_tokens, recipe.data.on_long_prompt)

    # Data and rewards: every row is read and, if there is a tokenizer, rendered.
    notes += _sandbox_notes(recipe)
    train = training_prompts(recipe.data, renderer, may_read, recipe.run.seed) if trains else None
    if train is not None:
        check_rows(recipe.reward, itertools.chain(train.rows, train.drawn))
        notes += [*_mark_notes(recipe, itertools.chain(train.rows, train.drawn)), *_dropped_notes(train)]
    held_out = {name: held_out_prompts(source) for name, source in recipe.data.eval.items()}
    notes += [*_overlap_notes(train, held_out), *_field_notes(renderer)]
    return Preflight(facts, train, held_out, tuple(notes))


def with_fitting_batch(recipe: Recipe, found: Preflight, loaded: Loaded) -> tuple[Recipe, Preflight]:
    """The recipe with recomputation, micro-batch, engine's share of the GPU and concurrent requests that fit the
    machine, and the findings with notes on them."""
    trainer, why = recipe.trainer, found.facts.padding
    if trainer.backend == "fsdp" and trainer.packing == "auto" and why:
        recipe = replace(recipe, trainer=replace(trainer, packing="padded"))
        found = replace(found, notes=(*found.notes, f"trainer.packing=padded: the model has {why}"))
    is_set = loaded.given("trainer", "max_tokens_per_microbatch") is not None
    recipe, of_layers = with_fitting_recompute(recipe, found.facts, is_set=is_set)
    recipe, of_batch = with_fitting_microbatch(recipe, found.facts, is_set=is_set)
    recipe, of_share = with_fitting_share(recipe, found.facts)
    of_user = (loaded.given("rollout", "vllm") or {}).get("max_num_seqs") is not None
    recipe, of_places = with_fitting_places(recipe, found.facts, is_set=of_user)
    return recipe, replace(found, notes=(*found.notes, *filter(None, (of_layers, of_batch, of_share, of_places))))


def check_server(serve: ServeSection, key: str | None) -> None:
    """Briefly binds the run server's address. Raises ConfigError if it is taken, not of this machine, or open to other
    machines without a key."""
    if not serve.enabled:
        return
    check_key(key, asked="ASYNCRL_API_KEY", do="choose a key of ASCII characters, or unset the variable")
    with bind(serve.host, serve.port) as listener:
        if key is None and not is_local(listener):
            found = "other machines can reach it, and ASYNCRL_API_KEY is not set"
            do = "set ASYNCRL_API_KEY to a key that clients send, or leave rollout.serve.host out"
            raise ConfigError(explain(f"rollout.serve.host={serve.host}", found, do))


def _check_places(recipe: Recipe, *, trains: bool) -> None:
    """Raises ConfigError if the run directory, or the object storage for publishes, cannot be used from here."""
    require_mounted({"run.dir": recipe.run.dir})
    if trains and recipe.weights.transport == "disk" and is_url(recipe.weights.disk_directory):
        check_store(recipe.weights.disk_directory)


def _check_processes(recipe: Recipe, facts: ModelFacts, *, trains: bool, plans: bool) -> None:
    """Asks the training backend and the engine whether they can run the model. `plans`: a dry run, perhaps for other
    machines. Raises ConfigError."""
    if trains:
        # A dry run of a recipe that says how large its GPUs are is for these.
        for_gpus = plans and recipe.ray.gpu_memory_gib is not None
        on_cpu = recipe.trainer.device == "cpu" or (_is_cpu_build() and not for_gpus)
        if recipe.is_colocated and on_cpu:
            engines.require_sleep(recipe.rollout.engine)
        if recipe.weights.stage:
            engines.require_staging(recipe.rollout.engine)
        require_trains(recipe.trainer.backend, facts)
        require_fits(recipe.trainer, facts)
        check_memory_fits(recipe, facts, gpu_bytes(recipe))
        engine = recipe.rollout.engine
        if recipe.trainer.router_replay == "rollout":
            engines.require_recording(engine, "experts", "trainer.router_replay=rollout", on_cpu=on_cpu)
            engines.require_routers(facts)
        if recipe.rollout.sampling.keep_sets:
            engines.require_recording(engine, "kept_ids", "rollout.sampling.keep_sets=true", on_cpu=on_cpu)
    engines.require_runs(recipe.rollout, facts)


def hub_names(recipe: Recipe) -> list[str]:
    """The models and datasets that a run looks up on the hub."""
    sources = [*(source.path for source in sources_of(recipe.data).values()), *recipe.data.eval.values()]
    of_hub = (source for source in sources if not is_place(source) and not is_generator(source))
    return [*(name for name, _ in hub_models(recipe)), *of_hub]


def hub_models(recipe: Recipe) -> list[tuple[str, str | None]]:
    """Name and revision of the models that the run's processes take from the hub."""
    models = [(recipe.model.path, recipe.model.revision), *((path, None) for path in _other_models(recipe).values())]
    models += [(pool.model.path, pool.revision) for pool, _ in recipe.pools.values()]
    return [(path, revision) for path, revision in models if is_hub_model(path)]


def _other_models(recipe: Recipe) -> dict[str, str]:
    """Key of the recipe -> path of a model other than the policy's."""
    algorithm = recipe.algorithm
    named = {"algorithm.kl.path": algorithm.kl.path if algorithm.needs_reference else None}
    named["algorithm.critic.path"] = algorithm.critic.path if algorithm.needs_critic else None
    return {key: path for key, path in named.items() if path not in (None, recipe.model.path)}


def _check_other_models(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, use_hub: bool) -> list[str]:
    """Notes on unchecked models. Raises ConfigError if a reference or a critic is missing, or has a different
    tokenizer."""
    own, notes = recipe.model.path, []
    for key, path in _other_models(recipe).items():
        facts = check_model(path, key)
        require_trains(recipe.trainer.backend, facts, key)
        require_fits(recipe.trainer, facts, key)
        if not facts.is_local and not use_hub:
            notes.append(f"{key}={path} comes from the hub: it is looked up when the run starts")
            continue
        if vocabulary(path, trust_remote_code=recipe.model.trust_remote_code) != tokenizer.get_vocab():
            found = f"its tokenizer has other tokens than that of model.path={own}"
            raise ConfigError(explain(f"{key}={path}", found, "name a model with the same tokenizer"))
    return notes


def _check_pools(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, use_hub: bool) -> list[str]:
    """Notes on unchecked models. Raises ConfigError if the model of a pool is missing, cannot be served as configured,
    or is a teacher with a different tokenizer than the policy."""
    notes = []
    for key, (pool, replicas) in recipe.pools.items():
        path = pool.model.path
        facts = check_model(path, f"{key}.path")
        if not facts.is_local and not use_hub:
            notes.append(f"{key}.path={path} comes from the hub: it is looked up when the run starts")
            continue
        if key == "judge":
            notes += _thinking_notes(pool.model, ChatTemplate(load_tokenizer(pool.model, key), pool.model), key)
        facts = facts if facts.is_local else hub_facts(pool.model)
        engines.require_runs(replicas, facts, section=f"{key}.")
        if key != "teacher":
            continue
        top_k = recipe.algorithm.distillation.top_k
        if facts.vocab_size is not None and top_k > facts.vocab_size:
            asked = f"algorithm.distillation.top_k={top_k} with {key}.path={path}"
            raise ConfigError(explain(asked, f"it has {facts.vocab_size} tokens", "lower top_k: 32 to 128 is usual"))
        if vocabulary(path, revision=pool.revision, trust_remote_code=pool.trust_remote_code) != tokenizer.get_vocab():
            found = f"its tokenizer has other tokens than that of model.path={recipe.model.path}"
            do = "name a teacher with the same tokenizer: its log-probabilities are of the policy's tokens"
            raise ConfigError(explain(f"{key}.path={path}", found, do))
    return notes


def _mark_notes(recipe: Recipe, rows: Iterable[PromptRow]) -> Iterator[str]:
    if "math" in recipe.reward.names and any(row.data_source == "gsm8k" and not asks_for_mark(row) for row in rows):
        asked = "the questions of gsm8k do not ask for a marked answer"
        yield f"{asked}, and reward math pays no other: data.system_prompt can"


def _dropped_notes(train: TrainingSet) -> list[str]:
    kept, dropped = len(train.rows), train.num_duplicates + train.num_dropped
    told = f"{dropped} of {dropped + kept} rows are dropped: see data.max_prompt_tokens, and which dataset it is"
    unused = f"columns of the training set that nothing uses: {', '.join(train.unused)}"
    return [*[told] * (dropped > kept), *[unused] * bool(train.unused)]


def _overlap_notes(train: TrainingSet | None, held_out: Mapping[str, RenderedPrompts | None]) -> Iterator[str]:
    trained = {hash(row.messages) for row in train.rows} if train is not None and held_out else set()
    for name, prompts in held_out.items():
        asked = {hash(row.messages) for row in prompts.rows} if prompts is not None else set()
        if both := len(asked & trained):
            yield f"held-out set {name}: {both} of its {len(asked)} questions are in the training set"


def _field_notes(renderer: PromptRenderer | None) -> Iterator[str]:
    if renderer is not None and renderer.template.unused:
        names = ", ".join(sorted(renderer.template.unused))
        yield f"the chat template leaves out these fields of messages: {names}"


def _thinking_notes(model: ModelConfig, template: ChatTemplate, section: str) -> Iterator[str]:
    if (asked := model.enable_thinking) is not None and not template.obeys_thinking:
        names = " or ".join(THINKING_SWITCHES)
        yield f"{section}.enable_thinking={str(asked).lower()} has no effect: the chat template does not follow {names}"


def _end_notes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, renderer: PromptRenderer) -> Iterator[str]:
    """Whether a response ends where the chat template ends a reply. Raises ConfigError: nothing ends one."""
    ends = stop_token_ids(tokenizer, recipe.model, recipe.rollout.stop)
    after = renderer.template.after_reply.strip()
    texts = (*recipe.rollout.stop, *map(str, tokenizer.convert_ids_to_tokens(list(ends))))
    if after and not any(text.strip() in after for text in texts):
        yield (
            f"the chat template ends a reply with {after[:40]!r}, where no response ends (they end at "
            f"{', '.join(texts)}): set rollout.sampling.stop"
        )


def _sandbox_notes(recipe: Recipe) -> list[str]:
    """Notes on the confinement of programs. Raises ConfigError if none can run, or confinement is weaker than the
    recipe allows."""
    tools, users = recipe.rollout.tool_use, {}
    if "code" in recipe.reward.names:
        users["reward code"] = "reward.code", recipe.reward.code.allow_basic_sandbox
    if recipe.rollout.environment in ("tool_use", "interleaved_tool_use") and "python" in tools.tools:
        users["tool python"] = "rollout.tool_use", tools.allow_basic_sandbox
    held = {user: require_protection(key, basic_allowed=allowed) for user, (key, allowed) in users.items()}
    return [f"{user}: programs are confined by {', '.join(names)} (docs/rewards.md)" for user, names in held.items()]


def _parser_notes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    if recipe.rollout.environment not in ("tool_use", "agent", "verifiers", "nemo_gym"):
        return
    template = template_text(tokenizer)
    parser = parser_for(recipe.rollout.tool_use.parser, template)
    how = "as the chat template writes them"
    if tools_for((), parser, template).in_words:
        how = "which the prompt explains in words, since the chat template writes no calls that are read so"
    yield f"tool calls: {shown(parser)!r}, {how} (rollout.tool_use.parser)"


def check_packages(recipe: Recipe, *, trains: bool = True) -> None:
    """Raises ConfigError if the chosen engine or a metric sink cannot run in this environment. `trains`: there will be
    trainer ranks."""
    for sink in recipe.observability.sinks:
        if importlib.util.find_spec(sink) is None:
            found = f"the package {sink} is not installed"
            do = f"pip install 'asyncrl[{sink}]'" if sink == "tensorboard" else f"pip install {sink}"
            raise ConfigError(explain(f"observability.sinks={recipe.observability.sinks}", found, do))
    for replicas in (recipe.rollout, *(replicas for _, replicas in recipe.pools.values())):
        engines.require_package(replicas)
    require_backend(recipe.trainer.backend)
    devices = {"trainer.device": recipe.trainer.device} if trains else {}
    if recipe.rollout.engine == "torch":
        devices["rollout.torch.device"] = recipe.rollout.torch.device
    wanting = [f"{key}={device}" for key, device in devices.items() if device != "cpu"]
    if wanting and _is_cpu_build() and sees_gpus(recipe):
        found = f"torch {metadata.version('torch')} is built without CUDA"
        do = "install torch with CUDA, or compute on the CPUs alone: set CUDA_VISIBLE_DEVICES='' for the command"
        raise ConfigError(explain(f"{' and '.join(wanting)} on this machine, which has NVIDIA GPUs", found, do))


def sees_gpus(recipe: Recipe) -> bool:
    """True if Ray will find NVIDIA GPUs: its cluster is this machine, with GPUs that are not hidden."""
    return has_nvidia_gpu() and joined_address(recipe.ray.address) is None


def _is_cpu_build() -> bool:
    return metadata.version("torch").endswith("+cpu")


def describe(recipe: Recipe, found: Preflight) -> Iterator[tuple[str, str]]:
    """The resolved plan: (label, text) of each line. Notes are easily overlooked facts; advice would speed up the
    run."""
    batch, rollout, trainer = recipe.batch, recipe.rollout, recipe.trainer
    # The run's shape: mode, placement, batch, rollout, trainer, devices.
    slots = (recipe.max_lag + 1) * batch.groups_per_step
    trajectories = batch.groups_per_step * batch.group_size
    workers = rollout.settings.num_workers
    detail = f" of {workers} workers" if workers > 1 else ""
    publishes = f"publish every {recipe.staleness.publish_every_steps} step(s)"
    yield "mode", f"{recipe.mode}: max_lag {recipe.max_lag}, {publishes}, generations in flight: {recipe.interrupt}"
    if recipe.is_colocated:
        yield "placement", f"colocated, in turns: {TURNS[recipe.mode]}"
    text = f"{batch.groups_per_step} groups x {batch.group_size} = {trajectories} trajectories a step, "
    text += f"{trajectories // trainer.layout.num_plans} per rank; at most {slots} groups "
    yield "batch", f"{text}({slots * batch.group_size} trajectories) exist at once"
    detail += f", up to {rollout.max_replicas} where there is room" if rollout.max_replicas else ""
    text = f"{rollout.num_replicas} {rollout.engine} replicas{detail}, max_model_len {rollout.max_model_len}, "
    text += f"{rollout.num_rollouters} rollouter(s), {rollout.environment}, reward {', '.join(recipe.reward.names)}"
    yield "rollout", text
    if rollout.environment in ("agent", "verifiers", "nemo_gym"):
        part = (
            "every reply, of all conversations" if trains_branches(recipe) else "the conversation of the last request"
        )
        yield "agent", f"trained is {part} (rollout.agent.train={rollout.agent.train})"
    for key, (pool, replicas) in recipe.pools.items():
        length = f"max_model_len {replicas.max_model_len}"
        yield key, f"{replicas.num_replicas} {replicas.engine} replica(s) of {pool.path}, {length}"
    sizes = f"{recipe.max_tokens_per_microbatch} tokens a micro-batch; weights by {recipe.weights.transport}"
    yield "trainer", f"{trainer.num_ranks} {trainer.backend} rank(s), lr {trainer.lr:g}, {sizes}"
    yield "GPUs", describe_demand(Demand.of(recipe))
    if not trainer.device.startswith("cuda"):
        cores, of_replica = local_cores(), replica_threads(recipe)
        of_rank = trainer_threads(recipe, cores=cores)
        yield "threads", f"on CPUs with {cores} cores: {of_rank} for each trainer rank, {of_replica} for each replica"
    if layout := _layout(trainer):
        yield "layout", layout
    yield from trainer_plan(_placed(recipe), found.facts)
    yield from _describe_server(recipe)
    # The task: penalties, prompts and how often each is trained, held-out sets.
    overlong = recipe.algorithm.overlong
    if overlong.buffer_tokens and overlong.penalty:
        tokens = f"the last {overlong.buffer_tokens} of {recipe.longest_response_tokens} response tokens"
        yield "overlong", f"a penalty up to {overlong.penalty:g} over {tokens}"
    total = recipe.run.max_steps * batch.groups_per_step
    if found.train is None:
        prompts, epochs = "prompts not counted", ""
    else:
        left_out = [
            *([f"{found.train.num_duplicates} duplicates, dropped"] if found.train.num_duplicates else []),
            *([f"{found.train.num_dropped} too long, dropped"] if found.train.num_dropped else []),
            *([f"{found.train.num_filtered} outside of the curriculum"] if found.train.num_filtered else []),
        ]
        drawn = [f"rows drawn from {each.name}" for each in found.train.generators]
        prompts = ", ".join([*[f"{len(found.train.rows)} prompts"] * (len(found.train.rows) > 0), *drawn])
        if left_out:
            prompts += f" ({', '.join(left_out)})"
        epochs = "" if drawn else f" = {total / len(found.train.rows):.2f} epochs"
    yield "data", f"{prompts}; {recipe.run.max_steps} steps train {total} groups{epochs}"
    yield from _describe_sources(found.train, total)
    for name, prompts in found.held_out.items():
        yield from _describe_held_out(recipe, name, prompts)
    notes = (*_ratio_notes(recipe), *_rate_notes(recipe, found.facts), *found.notes)
    yield from (("note", note) for note in notes)
    yield from (("advice", do) for do in advice(recipe, cores=local_cores() if computes_here(recipe) else None))


def _ratio_notes(recipe: Recipe) -> Iterator[str]:
    batch, algorithm = recipe.batch, recipe.algorithm
    recomputes = algorithm.ratio == "proximal" and algorithm.proximal == "recompute"
    if recomputes and batch.num_minibatches * batch.num_epochs == 1:
        yield "algorithm.ratio=proximal with one update a step: the ratio is 1, and its bounds never act"


def _rate_notes(recipe: Recipe, facts: ModelFacts) -> Iterator[str]:
    """Notes on a learning rate far from the usual one of the model's size, and on a reference model."""
    trainer, tensors = recipe.trainer, model_tensors(facts)
    if recipe.algorithm.needs_reference:
        path = recipe.algorithm.kl.path or recipe.model.path
        yield f"algorithm.kl loads {path} as reference, with a pass of its own; algorithm.kl.coefficient=0 needs none"
    size = 0 if tensors is None else sum(map(math.prod, tensors.values()))
    if size < _SMALLEST:
        return
    usual = (10 if trainer.lora.rank else 1) * 1e-6 * max(1.0, 7e9 / size) ** 0.75
    if not usual / 10 <= trainer.lr <= 5 * usual:
        kind = f"{'adapters' if trainer.lora.rank else 'all weights'} of {size / 1e6:.0f}M parameters"
        yield f"trainer.lr={trainer.lr:g}: usual for {kind} is about {usual:.0e} (docs/tuning.md)"


def _placed(recipe: Recipe) -> Recipe:
    """The recipe with devices resolved: GPUs for all processes that may use one, unless this machine's CPUs compute."""
    demand, here = Demand.of(recipe), computes_here(recipe)
    return recipe.placed(
        ranks_on_gpus=not here and demand.rank_gpus > 0,
        replicas_on_gpus=not here and demand.replica_gpus > 0,
        stages=engines.ENGINES[recipe.rollout.engine].stages,
    )


def _layout(trainer: TrainerConfig) -> str:
    """Which ranks share a plan; empty if none do."""
    plans, megatron = trainer.layout.num_plans, trainer.megatron
    if trainer.backend == "megatron":
        experts = f"experts over {megatron.expert_parallel} x {megatron.experts_split_by}"
        return f"tensor {megatron.tensor_parallel} x pipeline {megatron.pipeline_parallel} x {plans} copies; {experts}"
    shared = trainer.fsdp.context_parallel
    return f"{shared} ranks share the tokens of a micro-batch, {plans} micro-batches at once" if shared > 1 else ""


def _describe_server(recipe: Recipe) -> Iterator[tuple[str, str]]:
    serve, places = recipe.rollout.serve, recipe.rollout.settings.decodes_at_once
    if serve.enabled:
        limits, port = ExternalLimits.of(places, serve.share), serve.port or "(a free one)"
        clients = f"clients have at most {limits.external} of {places} places of each replica"
        yield "serve", f"on {serve.host} port {port} during the run: {clients}"


def _describe_held_out(recipe: Recipe, name: str, prompts: RenderedPrompts | None) -> Iterator[tuple[str, str]]:
    config = recipe.eval
    number = config.max_prompts if prompts is None else len(prompts.rows)
    said = f"{'at most ' if prompts is None else ''}{number} prompts"
    if prompts is not None and prompts.num_dropped:
        said += f" ({prompts.num_dropped} too long, dropped)"
    if config.every_steps:
        said += f" x {config.samples} = {number * config.samples} responses of up to {recipe.longest_response_tokens} "
        said += f"tokens, every {config.every_steps} steps, within {config.timeout_s:g} s"
    yield "held out", f"{name}: {said}"
    questions = Counter(row.messages for row in prompts.rows) if prompts is not None else Counter()
    if 0 < len(questions) < number:
        asked = f"{len(questions)} different questions, up to {max(questions.values())} times each"
        note = f"held-out set {name} asks {asked}: eval.samples multiplies that, and intervals count questions"
        yield "note", note


def _describe_sources(train: TrainingSet | None, num_groups: int) -> Iterator[tuple[str, str]]:
    if train is None:
        return
    whole = sum(source.weight for source in train.sources)
    for source in train.sources:
        share, rows = source.weight / whole, source.stop - source.start
        if source.is_endless:
            yield "source", f"{source.name}: {share:.1%} of the groups, each drawn anew"
            continue
        epochs = share * num_groups / rows
        yield "source", f"{source.name}: {rows} prompts, {share:.1%} of the groups = {epochs:.2f} epochs of it"
    if train.curriculum is not None and train.ease is not None:
        key, easy, hard = train.curriculum.key, train.ease.max(), train.ease.min()
        yield "curriculum", f"{key} from {easy:g} to {hard:g} in the first {train.curriculum.epochs} epoch(s)"


def advice(recipe: Recipe, *, cores: int | None) -> Iterator[str]:
    """Advice on the run, each line with its reason: processes would wait for cores, or responses for places. `cores`:
    of the machine whose CPUs compute; None: ranks and replicas have GPUs, or run on other machines."""
    rollout = recipe.rollout
    if rollout.engine not in PLACES:
        return  # the servers are already running
    if cores is not None:
        yield from _too_many_replicas(recipe, cores)
    trajectories = recipe.batch.groups_per_step * recipe.batch.group_size
    places, due = rollout.settings.decodes_at_once, math.ceil(trajectories / rollout.num_replicas)
    if due > places:
        yield (
            f"rollout.{rollout.engine}.{PLACES[rollout.engine]}={due} where the KV cache has room, or more replicas: a "
            f"step takes {trajectories} responses, and {rollout.num_replicas} replica(s) decode "
            f"{rollout.num_replicas * places} at once"
        )


def _too_many_replicas(recipe: Recipe, cores: int) -> Iterator[str]:
    replicas, threads, ranks = recipe.rollout.num_replicas, replica_threads(recipe), recipe.trainer.num_ranks
    alternate = recipe.mode == "sync" or recipe.is_colocated
    busy = ranks * (recipe.trainer.num_threads or 1)
    free = cores if alternate else cores - busy
    fitting = max(1, free // threads)
    if replicas > fitting:
        sharing = f"{replicas} replicas" + ("" if alternate else f" and {ranks} trainer rank(s)")
        yield f"rollout.num_replicas={fitting}: {sharing} share {cores} cores, and each waits for the others"
