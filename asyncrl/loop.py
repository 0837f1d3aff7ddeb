"""The algorithm on one page: asynchronous RL whose tokens have a bounded age, in one process. Start reading here.

    python -m asyncrl.loop      the tiny model of `make quickstart` learns to work its sums out, in about a minute

    ledger -- tickets --> generation -- complete groups --> ledger -- leases --> training
       ^                      ^         weights of the next version                 |
       +----- free slots -----+-----------------------------------------------------+

Generation (`TorchEngine`) and training (`FsdpBackend`) compute at the same time, in threads of their own; an event loop
between them owns all state. A full run has the same parts, in processes that may die: go on with `driver/run.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from asyncrl.algorithms import build_advantage
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.data.chat import Chat
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import AsyncRLError, cause
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.queue.ledger import Ledger
from asyncrl.queue.masking import StoredGroup, summarize
from asyncrl.queue.staleness import StalenessPolicy
from asyncrl.remote.waits import deadline
from asyncrl.rewards import RewardConfig, build_reward
from asyncrl.rollout.draft import Draft
from asyncrl.rollout.router import Router
from asyncrl.trainer.backends import build_backend
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import GenerationRequest, LeaseManifest, SamplingParams, Ticket, Trajectory, TrajectoryGroup
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender

logger = logging.getLogger("asyncrl.loop")
GROUPS_PER_STEP, GROUP_SIZE, MAX_TOKENS, NUM_ENGINES, BUCKET_BYTES, DEADLINE_S = 16, 8, 64, 2, 1 << 22, 120.0
# GRPO. The policy has changed since a token was sampled: its gradient has the weight min(p_now / p_sampled, 2).
ALGORITHM = AlgorithmConfig(ratio="proximal", corrections=[CorrectionConfig(name="truncated_is", high=2.0)])


class Loop:
    """Owns the ledger, the tokens of complete groups, engines and trainer; all of its methods run in one event loop."""

    def __init__(self, *, model: str, data: str, steps: int, max_lag: int, seed: int) -> None:
        """Raises ConfigError: there is no such model or data; it says which command makes the tiny ones."""
        config, self.steps, self.seed = ModelConfig(path=model), steps, seed
        # The task: rows in a shuffled order, their reward, and the model's chat format.
        self.chat, self.reward = Chat(load_tokenizer(config), config), build_reward(RewardConfig(function="math"))
        self.rows = load_rows(data)
        self.order = PromptStream(len(self.rows), seed)
        # Generation: engines with random weights, which sample nothing before the first publish.
        self.sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=tuple(sorted(self.chat.ends)))
        settings = TorchEngineConfig(num_slots=128, device="cpu")
        self.engines = [TorchEngine(config, settings, load_real_weights=False) for _ in range(NUM_ENGINES)]
        self.router = Router()
        # Between the two: the state of every group, and the tokens of those that are complete and not yet trained.
        self.policy = StalenessPolicy(GROUPS_PER_STEP, max_lag)
        self.ledger = Ledger(self.policy, max_groups=steps * GROUPS_PER_STEP, on_event=logger.debug)
        self.stored: dict[int, StoredGroup] = {}
        self.arrived = asyncio.Event()
        # Training: one rank and the sending end of the weights, in a thread of their own.
        self.spec = TrainerSpec(model=config, trainer=TrainerConfig(lr=5e-4), algorithm=ALGORITHM, seed=seed)
        self.sender = build_sender("ipc", BUCKET_BYTES, NUM_ENGINES)
        self.thread = ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(1,))

    async def run(self) -> list[LeaseManifest]:
        """Returns the lease of each step. The first error of any thread, task or wait ends the run, and is raised."""
        asyncio.get_running_loop().set_default_executor(self.thread)  # where `asyncio.to_thread` goes from here on
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            async with asyncio.TaskGroup() as self.tasks:  # a task for each group that is being generated
                async with deadline(DEADLINE_S, "start", do="raise DEADLINE_S"):
                    rank = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
                    self.backend = await asyncio.to_thread(build_backend, self.spec, **rank)
                    self.source = await asyncio.to_thread(self.sender.open)
                    await asyncio.gather(*(engine.start() for engine in self.engines))
                    await self.publish(version=0)
                return await self.train()
        except ExceptionGroup as errors:
            raise cause(errors.exceptions) from errors
        finally:
            async with deadline(DEADLINE_S, "stop", do="raise DEADLINE_S"):
                self.sender.close()
                await asyncio.gather(*(engine.stop() for engine in self.engines))
                await asyncio.to_thread(torch.distributed.destroy_process_group)

    async def generate(self, ticket: Ticket) -> None:
        """The task of one group, from its ticket (running) until all of its responses have a reward (ready)."""
        made = await asyncio.gather(*(self.respond(ticket.ordinal, index) for index in range(GROUP_SIZE)))
        group = TrajectoryGroup(ticket.ordinal, ticket.attempt, tuple(made)).validate()
        self.stored[ticket.ordinal] = StoredGroup(group, self.ledger.version)
        self.ledger.put(ticket, group.oldest_version)
        self.arrived.set()

    async def respond(self, ordinal: int, index: int) -> Trajectory:
        """One response and its reward. A publish aborts the request, and the next one goes on from its tokens with the
        weights that are served then: a partial rollout. Each token keeps the version that sampled it."""
        row, attempts, seed = self.rows[self.order.row_index(ordinal)], itertools.count(), (self.seed, ordinal, index)
        prompt_ids, draft, ended = self.chat.prompt(row.conversation()), Draft(), None
        while draft.complete(self.sampling, ended) is None:
            name, so_far = f"{ordinal}.{index}.{next(attempts)}", np.concatenate([prompt_ids, draft.token_ids])
            rest = replace(self.sampling, max_tokens=MAX_TOKENS - draft.num_tokens)
            request = GenerationRequest(name, so_far, rest, seed=hash(seed), first_position=draft.num_tokens)
            replica_id = self.router.pick(session_id=f"group {ordinal}")
            async for chunk in self.engines[replica_id].generate(request):
                draft.add(chunk, replica_id)
                ended = chunk.finish_reason
            self.router.done(replica_id)
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=draft.token_ids,
            logprobs=draft.logprobs,
            loss_mask=np.ones(draft.num_tokens, np.bool_),
            segments=draft.segments,  # which version sampled which tokens
            reward=self.reward(self.chat.decode(draft.token_ids), row).reward,
        )

    async def train(self) -> list[LeaseManifest]:
        """Lease, optimizer step, publish, and again. The engines generate all the while."""
        leases, advantage, max_lag = [], build_advantage(ALGORITHM.advantage), self.policy.max_lag
        rules = PackingRules(num_plans=1, max_tokens_per_microbatch=16384, share_prompts=True)
        for step in range(self.steps):
            async with deadline(DEADLINE_S, f"step {step}", do="raise DEADLINE_S"):
                # Those of the ready groups that must be trained first: ready -> leased.
                while not (chosen := self.ledger.lease(step).chosen):
                    self.arrived.clear()
                    await self.arrived.wait()
                stored = [self.stored.pop(ordinal) for ordinal in chosen]
                groups = tuple(summarize(s, s.group, step=step, max_lag=max_lag) for s in stored)
                assert all(group.lag_max <= max_lag for group in groups), f"step {step} would train too old a token"
                # Rewards -> advantages -> micro-batches -> gradient -> weights: leased -> trained.
                leases.append(lease := LeaseManifest(step, groups))
                (plan,) = plan_step(lease, [advantage(np.array(group.rewards)) for group in groups], rules)
                trajectories = {(s.group.ordinal, i): t for s in stored for i, t in enumerate(s.group.trajectories)}
                metrics = await asyncio.to_thread(self.backend.train_step, plan, trajectories)
                self.ledger.commit(step)
                await self.publish(version=step + 1)
            reward, lag = np.mean([g.rewards for g in groups]), sum(g.lag_sum for g in groups) / metrics.trained_tokens
            numbers = step + 1, reward, lag, max(g.lag_max for g in groups), sum(g.interrupted for g in groups)
            logger.info("step %3d  reward %.2f  lag %.2f, at most %d  partial rollouts %3d", *numbers)
        logger.info("the ledger at the end: %s", self.ledger.counts)
        assert self.ledger.counts.admitted == self.ledger.counts.trained, "a group was lost"
        return leases

    async def publish(self, version: int) -> None:
        """Makes the engines serve the policy after `version` steps. They receive it while they sample, and stand still
        only to load it, one after the other. From then on their tokens carry its number."""
        manifest = replace(make_manifest(version, version, self.backend.weight_specs(), BUCKET_BYTES), is_staged=True)
        sending = asyncio.to_thread(self.sender.send, manifest, self.backend.named_weights(), DEADLINE_S)
        ends = [(engine, replace(self.source, receiver=number)) for number, engine in enumerate(self.engines)]
        receiving = [engine.stage_weights(manifest, source, DEADLINE_S) for engine, source in ends]
        sent, *received = await asyncio.gather(sending, *receiving)
        assert all(digest == sent for digest in received), "other bytes came than were sent"
        for replica_id, engine in enumerate(self.engines):
            await engine.pause("abort")
            await engine.load_staged(DEADLINE_S)
            await engine.commit(version)
            await engine.resume()
            self.router.put(replica_id, version)
        self.ledger.published(version)
        # At most (version + max_lag - trained steps + 1) * GROUPS_PER_STEP groups are unfinished, which bounds the lag.
        for ticket in self.ledger.admit(limit=sys.maxsize):
            self.tasks.create_task(self.generate(ticket))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.loop", description="Asynchronous RL in one process.")
    defaults = {"model": "runs/tiny-qwen3", "data": "data/arithmetic_train.jsonl", "steps": 40, "max-lag": 2, "seed": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--verbose", action="store_true", help="show every transition of the ledger")
    options = vars(parser.parse_args(argv))
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logger.setLevel(logging.DEBUG if options.pop("verbose") else logging.INFO)
    try:
        asyncio.run(Loop(**options).run())
    except (AsyncRLError, KeyboardInterrupt) as error:
        logger.info("%s", str(error) or "ended by Ctrl-C")
        return error.exit_code if isinstance(error, AsyncRLError) else 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
