"""Worker extension (`--worker-extension-cls`) of a `vllm serve` started by someone else, which receives the publishes
of `rollout.engine=remote`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank

from asyncrl.inference.remote.orders import read_order
from asyncrl.inference.remote.vllm_facts import ServerFacts
from asyncrl.inference.shared.weight_update import WorkerUpdate
from asyncrl.inference.vllm.layerwise_reload import reload_of


class ServeExtension:
    """Methods that vLLM adds to its workers; the route /collective_rpc calls them."""

    vllm_config: VllmConfig
    device: torch.device
    model_runner: Any

    def asyncrl_describe(self) -> dict[str, Any]:
        """`ServerFacts` of this server."""
        config = self.vllm_config
        model, hf = config.model_config, config.model_config.hf_config
        facts = ServerFacts(
            architecture=(getattr(hf, "architectures", None) or [type(hf).__name__])[0],
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            world_size=config.parallel_config.world_size,
            pipeline_parallel=config.parallel_config.pipeline_parallel_size,
            logprobs_mode=str(model.logprobs_mode),
            device=self.device.type,
            chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
            tied=bool(getattr(hf, "tie_word_embeddings", False)),
            dummy=str(config.load_config.load_format) == "dummy",
        )
        return asdict(facts)

    def asyncrl_publish(self, order: str) -> list[Any]:
        """Applies one publish (`orders.write_order`) while the server is paused.

        Returns: `WorkerUpdate.outcome`. Raises ValueError: malformed order.
        """
        manifest, source, timeout_s = read_order(order)
        with set_current_vllm_config(self.vllm_config):
            parallel = self.vllm_config.parallel_config
            # Every worker of every engine is a receiver of its own.
            worker = parallel.data_parallel_index * parallel.world_size + get_tensor_model_parallel_rank()
            outcome = self._asyncrl_update().apply(source, worker, manifest, timeout_s)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next step uses the new weights
        return outcome

    def asyncrl_confirm(self, digest: list[int] | None) -> None:
        """Raises RuntimeError unless the last publish ended here with `digest`, computed by the server's first engine.
        vLLM returns answers of the first engine only, but errors of all engines."""
        name, message, own = self._asyncrl_update().outcome()
        if name or own != digest:
            raise RuntimeError(f"{name}: {message}" if name else "the weights that arrived differ between engines")

    def _asyncrl_update(self) -> WorkerUpdate:
        """Created once per worker, because it stays joined to its sender."""
        held = self.__dict__.get("_asyncrl_held")
        if held is None:
            made = reload_of(self.model_runner.get_model(), self.vllm_config.model_config)
            held = self.__dict__["_asyncrl_held"] = WorkerUpdate(*made, self.device)
        return held
