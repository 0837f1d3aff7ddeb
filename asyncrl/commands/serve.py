"""`asyncrl-serve MODEL [key=value ...]`: an OpenAI-compatible endpoint in front of replicas of one model.

    client --HTTP--> Api --> Fleet --> GenerationClient --> Router --> Replica[0..R)   (Ray actors)
                                           ^ table of who serves
                                       ReplicaPool (replaces dead replicas)

Exit codes: 1 it failed, the error is named; 2 bad input, nothing was started; 130 and 143 it was ended by SIGINT or
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from asyncrl.commands import (
    EXIT_PROGRAM_ERROR,
    EXIT_SIGNAL_BASE,
    at_signals,
    log_failure,
    new_log,
    plain_console,
    refuse,
)
from asyncrl.config.hidden import Hidden
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import load_recipe, serving_api_key
from asyncrl.config.paths import is_hub_model
from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.serving import ServingConfig
from asyncrl.data.model_files import check_model, hub_facts
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.preflight import check_packages
from asyncrl.driver.preload import start_preloading
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engines import ENGINES, STANDALONE, require_runs
from asyncrl.remote.tasks import cancel
from asyncrl.types import ReplicaTable

if TYPE_CHECKING:
    from asyncrl.driver.fleet.replica_pool import ReplicaPool
    from asyncrl.serving.model_text import ModelText

logger = logging.getLogger("asyncrl.commands.serve")

_BASE = ("data.train=none", "data.max_prompt_tokens=1", "rollout.sampling.max_response_tokens=1")
"""Keys that a recipe requires and serving does not use."""

_SERVING = ("rollout.poll_interval_s=0.01", "rollout.vllm.stream_interval=1", "rollout.sglang.stream_interval=1")
"""Shorter polls than in training, and single tokens, so that readers see tokens sooner."""


@dataclass(frozen=True, slots=True)
class Service:
    """A checked service; `listener` is bound to its port, at `address`."""

    config: ServingConfig
    recipe: Recipe
    text: ModelText
    listener: socket.socket
    log_file: Path
    address: str

    @property
    def name(self) -> str:
        return self.config.model_name or self.recipe.model.path


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    with ForkServer() as forks:
        return _main(arguments, forks)


def _main(arguments: argparse.Namespace, forks: ForkServer) -> int:
    console = Console(stderr=False)
    try:
        config, recipe = _config(arguments), _recipe(arguments)
        start_preloading(forks, recipe, trains=False)  # imports while this process reads the input and starts Ray
        service = prepare(config, recipe)
    except ConfigError as e:
        return refuse(f"asyncrl-serve: this model cannot be served\n{e}", e)

    from asyncrl.chat.server import is_local
    from asyncrl.observability.logs import configure_driver

    configure_driver(service.log_file, console, Hidden())
    say = plain_console().print
    say(f"asyncrl-serve {service.name}", style="bold")
    rollout = service.recipe.rollout
    say(f"  starting {rollout.num_replicas} {rollout.engine} replica(s); log {service.log_file}")
    if not is_local(service.listener) and service.config.api_key is None:
        logger.warning("%s is open to every machine that can reach it: set --api-key", service.address)
    try:
        number = run(service, forks)
    except KeyboardInterrupt:
        number = signal.SIGINT
    except Exception as e:  # noqa: BLE001 - end of the program: it is logged
        log_failure(logger, "serving failed", e)
        return EXIT_PROGRAM_ERROR
    say(f"ended by {signal.Signals(number).name}")
    return EXIT_SIGNAL_BASE + number


def prepare(config: ServingConfig, recipe: Recipe) -> Service:
    """Checks the input and takes the port. Starts nothing.

    Raises ConfigError: model files, tokenizer, engine, lengths, or an address that is taken.
    """
    model, rollout = recipe.model, recipe.rollout
    facts = check_model(model.path)
    use_cache_if_unreachable(filter(is_hub_model, [model.path]))
    check_packages(recipe, trains=False)
    if config.discovery_file is not None and not config.discovery_file.absolute().parent.is_dir():
        found = f"{config.discovery_file.absolute().parent} is no directory"
        raise ConfigError(explain(f"--discovery-file {config.discovery_file}", found, "create it, or name another"))

    from asyncrl.chat.server import address_of, bind
    from asyncrl.serving.model_text import ModelText

    facts = facts if facts.is_local else hub_facts(model)
    require_runs(rollout, facts, section="")
    text = ModelText.of(model, rollout, facts.vocab_size)
    listener = bind(config.host, config.port, keys="--")
    log = (config.log_file or new_log("asyncrl-serve")).absolute()
    return Service(config, recipe, text, listener, log, address_of(listener))


def run(service: Service, forks: ForkServer) -> int:
    """Serves until a signal and returns its number. Shuts everything down before it raises."""
    from asyncrl.driver.cluster.ray_session import ray_cluster

    with ray_cluster(None, service.log_file, forks=forks) as cluster:
        return asyncio.run(_run(service, cluster.engine_environment(service.recipe.rollout.engine)))


async def _run(service: Service, environment: Mapping[str, str]) -> int:
    from asyncrl.driver.fleet.standalone import standalone_pool

    stopped = asyncio.Event()
    signals = at_signals(stopped.set)
    model, rollout, recovery = service.recipe.model, service.recipe.rollout, service.recipe.recovery
    start_s = service.config.start_timeout_s
    replicas = standalone_pool(model, rollout, recovery, environment=environment, start_timeout_s=start_s)
    stop = asyncio.create_task(stopped.wait(), name="stop")
    try:
        started = asyncio.create_task(replicas.start(), name="start")
        await asyncio.wait([started, stop], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await cancel(started)
            return signals[0]
        await started
        await _serve(service, replicas, stop)
        return signals[0]
    finally:
        stop.cancel()
        await replicas.stop(ENGINES[rollout.engine].stop_timeout_s)


async def _serve(service: Service, replicas: ReplicaPool, stop: asyncio.Task[Any]) -> None:
    """Serves until `stop` is done. Raises the error that ended the replicas or the HTTP server."""
    from asyncrl.chat.server import is_local, serve_until
    from asyncrl.driver.fleet.actor_channels import channels
    from asyncrl.rollout.generation import GenerationClient
    from asyncrl.serving.app import Api, ServedModel
    from asyncrl.serving.discovery import DiscoveryFile, FleetAddress
    from asyncrl.serving.fleet import Fleet
    from asyncrl.serving.metrics import ServingMetrics

    config, rollout = service.config, service.recipe.rollout
    name = f"serve-{os.getpid()}"
    # Phase 1: route requests by the pool's table.
    client = GenerationClient(
        name,
        ReplicaTable(),
        request_timeout_s=config.request_timeout_s + 60,  # the server's own deadline comes first: its error says more
        poll_interval_s=rollout.poll_every_s,
        waits_for_replacements=True,
        max_lost=service.recipe.recovery.replicas_per_response(rollout.num_replicas),
    )

    async def route(table: ReplicaTable) -> None:
        client.set_replicas(channels(table, name))
        await client.handed_over()

    await replicas.set_listener(route)
    address = FleetAddress(service.address, service.name, rollout.engine, os.getpid(), time.time())
    discovery = DiscoveryFile(config.discovery_file.absolute(), address) if config.discovery_file else None
    fleet = Fleet(client, replicas, refresh_s=config.refresh_s)
    if discovery is not None:
        fleet.on_refresh = lambda: discovery.write(fleet.reports)
    # Phase 2: the HTTP side.
    metrics = ServingMetrics()
    api = Api(
        ServedModel(service.name, service.text, address.started_at, guided=rollout.guided_decoding),
        fleet,
        metrics,
        api_key=config.api_key,
        request_timeout_s=config.request_timeout_s,
        max_requests=config.max_requests,
        local_only=is_local(service.listener) and config.api_key is None,
    )
    server = api.server(math.ceil(config.stop_timeout_s))
    # Phase 3: serve until `stop`, or until the fleet or the server fails.
    try:
        await fleet.refresh()
        watching = asyncio.create_task(fleet.watch(), name="fleet")
        serving = asyncio.create_task(server.serve(sockets=[service.listener]), name="http")
        logger.info("serving %s at %s/v1", service.name, service.address)
        await serve_until(stop, server, serving, watching)
    finally:
        if discovery is not None:
            discovery.remove()
        await client.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-serve",
        description="Serve a model behind one OpenAI-compatible address.",
        epilog="key=value overrides keys of a recipe's rollout section, for example vllm.max_model_len=2048, or of its "
        "model and recovery sections with their prefix, for example model.chat_template=FILE. "
        "data.image_directory=DIR serves images, which it keeps there. "
        "exit codes: 1 failed, 2 bad input (nothing started), 130/143 ended by a signal",
    )
    add = parser.add_argument
    add("model", help="directory in Hugging Face format, or a hub name")
    add("overrides", nargs="*", metavar="key=value", help="override a key, for example torch.max_model_len=256")
    add("--engine", default="torch", choices=sorted(STANDALONE))
    add("--replicas", type=int, default=1, metavar="N", help="copies of the model (default 1)")
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, help="of weights and compute (default float32, also on a GPU)")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    add("--api-key", metavar="KEY", help="clients must send `Authorization: Bearer KEY`; or set ASYNCRL_API_KEY")
    named = "what clients call the model (default MODEL)"
    add("--served-model-name", dest="model_name", default="", metavar="NAME", help=named)
    add("--discovery-file", type=Path, metavar="PATH", help="JSON that says where the fleet is, while it serves")
    add("--log-file", type=Path, metavar="PATH", help="logs of all processes (default in the temporary directory)")
    add("--max-requests", type=int, default=1024, metavar="N", help="in flight; more get 429 (default %(default)s)")
    add("--request-timeout-s", type=float, default=600.0, metavar="S", help="longest time of a request (%(default)s)")
    add("--stop-timeout-s", type=float, default=10.0, metavar="S", help="for requests after a signal (%(default)s)")
    return parser


def _config(arguments: argparse.Namespace) -> ServingConfig:
    given: dict[str, Any] = vars(arguments) | {
        "api_key": serving_api_key() if arguments.api_key is None else arguments.api_key
    }
    return ServingConfig(**{field.name: given[field.name] for field in fields(ServingConfig) if field.name in given})


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The model and rollout sections as overrides on an empty recipe: same keys, checks and messages as in training."""
    engine = arguments.engine
    # Training derives the context length from its limits on prompt and response, which serving does not have.
    of_engine = [f"max_model_len={RolloutConfig(engine=engine).max_model_len}", *ENGINES[engine].serving]
    settings = [
        *_BASE,
        *_SERVING,
        *(f"rollout.{engine}.{setting}" for setting in of_engine),
        f"model.path={json.dumps(arguments.model)}",
        f"rollout.engine={engine}",
        f"rollout.num_replicas={arguments.replicas}",
    ]
    if arguments.dtype is not None:
        settings.append(f"model.inference_dtype={arguments.dtype}")
    others = "model.", "recovery.", "data.image_directory="
    settings += [o if o.startswith(others) else f"rollout.{o}" for o in arguments.overrides]
    return load_recipe(Path(os.devnull), settings)


if __name__ == "__main__":
    sys.exit(main())
