"""A trainer rank in this process, an embedded engine in a child, and the project's own transports between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7b": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "4b": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    "moe": {  # six layers of Qwen3-30B-A3B
        "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
"""The sizes of Qwen3's models."""
TINY: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.1,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Operations a second with dense bfloat16 matrices, as NVIDIA's data sheets say for the SXM models."""
PROMPT_IDS = 256
"""Prompts are random ids below it, which every model has."""

Response = tuple[list[int], list[int], list[float], list[int]]
"""Prompt ids, response ids, their log-probabilities, and the versions that sampled them."""


def figure(**values: object) -> None:
    """Prints one line of figures, which the lane collects."""
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
    print("figure " + json.dumps(rounded), flush=True)


def write_model(size: str, directory: Path, *, tiny: bool) -> None:
    """A random model of that size in bfloat16, made on the GPU where there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = {"num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128, **MODELS[size]}
    has_experts = "num_experts" in facts
    if tiny:
        facts = {**TINY, **(TINY_EXPERTS if has_experts else {})}
    facts |= {"norm_topk_prob": True} if has_experts else {}
    config = AutoConfig.for_model(
        "qwen3_moe" if has_experts else "qwen3",
        max_position_embeddings=40960,
        tie_word_embeddings=not has_experts,
        eos_token_id=None,
        bos_token_id=None,
        **facts,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    figure(model=size, parameters=sum(p.numel() for p in model.parameters()), tiny=tiny)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_gib(*, reset: bool = False) -> float:
    """Most memory of the GPU that this process's tensors have taken; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    found = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


# -- the replica -----------------------------------------------------------------------------------------------------


def _serve(pipe: Any, path: str, slots: int, length: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # before the first call of NCCL
    asyncio.run(_answer(pipe, path, slots, length))


async def _answer(pipe: Any, path: str, slots: int, length: int) -> None:
    """Does what arrives on the pipe until None does."""
    from asyncrl.config.model import ModelConfig
    from asyncrl.config.rollout import TorchEngineConfig
    from asyncrl.inference.torch_engine.engine import TorchEngine

    model = ModelConfig(path=path, inference_dtype="bfloat16")
    engine = TorchEngine(model, TorchEngineConfig(num_slots=slots, max_model_len=length), load_real_weights=False)
    await engine.start()
    pipe.send("up")
    while (command := await asyncio.to_thread(pipe.recv)) is not None:
        what, *arguments = command
        try:
            work = _receive(engine, *arguments) if what == "receive" else _generate(engine, *arguments)
            pipe.send((what, await work))
        except Exception as error:  # noqa: BLE001 - process boundary: the lane reports it
            pipe.send(("error", f"{type(error).__name__}: {error}"))
    await engine.stop()


async def _receive(engine: Any, manifest: Any, source: Any, timeout_s: float) -> tuple[Any, float, float]:
    await engine.pause("abort")
    began = time.monotonic()
    digest = await engine.load_weights(manifest, source, timeout_s)
    took_s = time.monotonic() - began
    await engine.commit(manifest.version)
    await engine.resume()
    return digest, took_s, peak_gib()


async def _generate(engine: Any, count: int, prompt: int, tokens: int) -> tuple[list[Response], float]:
    from asyncrl.types import GenerationRequest, SamplingParams

    async def one(number: int) -> Response:
        ids = np.random.default_rng(number).integers(0, PROMPT_IDS, prompt).astype(np.int32)
        request = GenerationRequest(
            f"r{time.monotonic_ns()}-{number}", ids, SamplingParams(max_tokens=tokens), seed=number
        )
        chunks = [chunk async for chunk in engine.generate(request)]
        sampled = [int(t) for c in chunks for t in c.token_ids]
        return (
            ids.tolist(),
            sampled,
            [float(x) for c in chunks for x in c.logprobs],
            sorted({c.version for c in chunks}),
        )

    began = time.monotonic()
    return list(await asyncio.gather(*(one(number) for number in range(count)))), time.monotonic() - began


class Replica:
    """An embedded engine in a child process."""

    def __init__(self, path: Path, *, slots: int = 64, length: int = 1024, environment: dict[str, str] | None = None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, str(path), slots, length, environment or {})
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(300):
            raise TimeoutError("the engine did not start within 300 s")
        self.pipe.recv()

    def answer(self, timeout_s: float = 300.0) -> Any:
        """The result of the last command. Raises TimeoutError, RuntimeError: what failed there."""
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
        what, found = self.pipe.recv()
        if what == "error":
            raise RuntimeError(found)
        return found

    def generate(self, count: int, tokens: int) -> list[Response]:
        self.pipe.send(("generate", count, 32, tokens))
        responses, took_s = self.answer(600)
        sampled = sum(len(r[1]) for r in responses)
        figure(generated=sampled, tokens_per_s=sampled / took_s)
        return responses

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(30)
        self.process.kill()


# -- the trainer -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Trainer:
    """One rank, and the groups that its plans name."""

    worker: Any
    groups: dict[int, Any]
    path: Path
    settings: Any
    """Its `TrainerConfig`."""

    def announced_gib(self, tokens: int) -> float:
        """What `--dry-run` announces as the most that the rank holds, with micro-batches of so many tokens."""
        from asyncrl.trainer.backends import memory_of
        from asyncrl.trainer.model_tensors import model_tensors
        from asyncrl.types import ModelFacts

        facts = ModelFacts.of_config(str(self.path), json.loads((self.path / "config.json").read_text()))
        tensors = model_tensors(facts)
        assert tensors is not None, "the sizes of the lane's models are known"
        experts = facts.sizes.experts_per_token or 1
        options = {"critic": False, "reference": False, "tokens": tokens, "experts_per_token": experts}
        (found,) = memory_of(self.settings, tensors, **options)
        return (found.peak or 0) / 2**30

    def plan(self, responses: Sequence[Response], budget: int) -> Any:
        """For one rank: a group for each response, with advantages of 1 and -1 in turn."""
        from asyncrl.trainer.packing import PackingRules, plan_step
        from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Segment, Trajectory, TrajectoryGroup

        summaries = []
        for number, (prompt, ids, logprobs, versions) in enumerate(responses):
            n = len(ids)
            trajectory = Trajectory(
                np.array(prompt, np.int32),
                np.array(ids, np.int32),
                np.array(logprobs, np.float32),
                np.ones(n, bool),
                (Segment(0, n, versions[0], 0),),
                0.0,
            )
            self.groups[number] = TrajectoryGroup(number, 0, (trajectory,))
            summaries.append(GroupSummary(number, 0, (Lengths(len(prompt), n, n),), (0.0,), (), 1, 0))
        signs = [np.array([1.0 if number % 2 else -1.0]) for number in range(len(summaries))]
        rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget)
        return plan_step(LeaseManifest(0, tuple(summaries)), signs, rules)[0]

    def mismatch(self, plan: Any, responses: Sequence[Response]) -> dict[str, float]:
        """Of the log-probabilities, engine against trainer, in nats."""
        trajectories = {(number, 0): group.trajectories[0] for number, group in self.groups.items()}
        own = self.worker._backend.logprobs(plan, trajectories)
        ours = np.concatenate([own[number, 0].double().cpu().numpy() for number in range(len(responses))])
        theirs = np.concatenate([np.array(r[2]) for r in responses])
        gap = np.abs(ours - theirs)
        return {
            "mean": float(gap.mean()),
            "p99": float(np.quantile(gap, 0.99)),
            "max": float(gap.max()),
            "k1": float((theirs - ours).mean()),
        }

    def step(self, plan: Any, tokens: int) -> Any:
        """One optimizer step, with its figures."""
        peak_gib(reset=True)
        began = time.monotonic()
        metrics = asyncio.run(self.worker.train_step(plan))
        took_s = time.monotonic() - began
        figure(
            step_s=took_s, tokens_per_s=tokens / took_s, peak_gib=peak_gib(), grad_norm=metrics.grad_norm,
            **self._mfu(tokens / took_s),
        )  # fmt: skip
        return metrics

    def _mfu(self, tokens_per_s: float) -> dict[str, float]:
        """Share of the GPU's arithmetic in bfloat16 that the model itself needs: 6 operations a token and parameter in
        use, attention and recomputed layers not counted. Empty for a GPU whose peak is not known."""
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
        if peak is None:
            return {}
        config = json.loads((self.path / "config.json").read_text())
        used, of = config.get("num_experts_per_tok", 1), config.get("num_experts", 1)
        shapes = {spec.name: spec.shape for spec in asyncio.run(self.worker.weight_specs())}
        if not config.get("tie_word_embeddings"):
            shapes.pop("model.embed_tokens.weight")  # it is looked up, not multiplied
        active = sum(math.prod(s) * (used / of if ".experts." in name else 1) for name, s in shapes.items())
        return {"mfu": 6 * active * tokens_per_s / peak}


@contextlib.contextmanager
def trainer(path: Path, *, compiles: bool = False, **fsdp: Any) -> Iterator[Trainer]:
    from asyncrl.config.algorithm import AlgorithmConfig
    from asyncrl.config.model import ModelConfig
    from asyncrl.config.trainer import FsdpConfig, TrainerConfig
    from asyncrl.trainer.trainer_spec import TrainerSpec
    from asyncrl.trainer.trainer_worker import TrainerWorker

    settings = FsdpConfig(param_dtype="bfloat16", **fsdp)
    spec = TrainerSpec(
        model=ModelConfig(path=str(path), inference_dtype="bfloat16"),
        trainer=TrainerConfig(lr=1e-4, compile=compiles, recompute="full", fsdp=settings),
        algorithm=AlgorithmConfig(),
    )
    groups: dict[int, Any] = {}
    fetch = lambda keys: [groups[o].sequences[i] for o, i in keys]  # noqa: E731
    worker = TrainerWorker(spec, 0, fetch, lambda keys: {}, lambda: "127.0.0.1")
    began = time.monotonic()
    asyncio.run(worker.start(*asyncio.run(worker.open_rendezvous()), 300.0))
    figure(trainer_start_s=time.monotonic() - began)
    try:
        yield Trainer(worker, groups, path, spec.trainer)
    finally:
        asyncio.run(worker.stop())


class Link:
    """The sending end of a transport to one replica."""

    def __init__(self, trainer: Trainer, replica: Replica, transport: str, bucket_bytes: int) -> None:
        from asyncrl.config.weights import WeightsConfig

        self._worker, self._replica, self._bucket_bytes = trainer.worker, replica, bucket_bytes
        config = WeightsConfig(transport=transport, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
        self._source = asyncio.run(trainer.worker.open_weights(config, 1))
        self._publishes = 0

    @property
    def offers_gpu_memory(self) -> bool:
        """Whether the sender could export memory of its GPU by CUDA IPC."""
        return bool(getattr(self._source, "device_memory", ""))

    def begin(self, version: int, *, verify: bool, timeout_s: float = 120.0) -> Any:
        """Tells the replica to receive; returns the manifest to send."""
        from asyncrl.weights.plan import make_manifest

        self._publishes += 1
        specs = asyncio.run(self._worker.weight_specs())
        manifest = make_manifest(self._publishes, version, specs, self._bucket_bytes, verify=verify)
        self._replica.pipe.send(("receive", manifest, self._source, timeout_s))
        return manifest

    def send(self, manifest: Any, timeout_s: float, *, at_first_ack: Callable[[int], None]) -> None:
        """As `TrainerWorker.send_weights`. Calls `at_first_ack` once, with the largest bucket that the replica has
        acknowledged: when the sender takes a tensor to pack, and the replica has acknowledged a bucket."""

        def weights() -> Iterator[tuple[str, Any]]:
            due = True
            for item in self._worker._backend.named_weights():
                acknowledged = max(channel._acked.values(), default=-1)
                if due and acknowledged >= 0:
                    due = False
                    at_first_ack(acknowledged)
                yield item

        guarded = self._worker._sender
        channel = guarded._sender._channel
        guarded.send(manifest, weights(), timeout_s)

    def publish(self, version: int, *, verify: bool) -> float:
        """One publish; GB/s of the sender. Raises AssertionError: the digests differ."""
        manifest = self.begin(version, verify=verify)
        began = time.monotonic()
        ours = asyncio.run(self._worker.send_weights(manifest, 120.0))
        took_s = time.monotonic() - began
        theirs, received_s, replica_gib = self._replica.answer()
        assert ours == theirs, f"the digests of version {version} differ"
        speed = manifest.nbytes / 1e9 / took_s
        figure(
            publish=version, bucket_bytes=self._bucket_bytes, verify=verify, tensors=len(manifest.tensors),
            gb=manifest.nbytes / 1e9, s=took_s, received_s=received_s, gb_per_s=speed, trainer_peak_gib=peak_gib(),
            replica_peak_gib=replica_gib, us_per_tensor=1e6 * took_s / len(manifest.tensors),
        )  # fmt: skip
        return speed
