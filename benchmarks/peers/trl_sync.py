"""The job of `compare.py` on TRL's synchronous GRPO trainer with vLLM in its process. Runs in TRL's own environment.

    python benchmarks/peers/trl_sync.py --model DIR --prompts FILE --steps 25 --marks OUT.jsonl

--alone generates with transformers instead of vLLM. Writes one line per optimizer step: when it ended, in seconds since
the epoch. What is set around TRL is what its settings do not reach on a CPU: float32 and no compilation for vLLM, and a
weight transfer that repacks vLLM's linear layers as a whole (tensor by tensor their loaders are gone after the first
load).
"""

import argparse
import functools
import json
import os
import re
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": os.environ.get("MASTER_PORT", "29611"),
}

import torch
import trl.generation.vllm_generation as vllm_generation
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reload_as_a_whole(self) -> None:
    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights(weights_iterator=((name, tensor.detach()) for name, tensor in self._iter_named_params()))
    head = runner.model.lm_head  # a tied head keeps its packed copy
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
    self.llm.reset_prefix_cache()


class Marks(TrainerCallback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_step_end(self, args, state, control, **rest) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "at_s": time.time()}) + "\n")


def by_ids(completion_ids, **rest) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def by_answer(completions, answer, **rest) -> list[float]:
    """1.0 where the last number of the reply is the answer."""
    numbers = [re.findall(r"-?\d+", replies[-1]["content"]) for replies in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    for name in ("--model", "--prompts", "--marks"):
        parser.add_argument(name, required=True)
    for name, default in (("--steps", 25), ("--prompts-per-step", 16), ("--group-size", 8), ("--tokens", 64)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--system-prompt", default="", help="asked as a chat, and answers are judged")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    vllm_generation.VLLMGeneration.sync_weights = reload_as_a_whole
    with open(options.prompts, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if options.system_prompt:
        told = {"role": "system", "content": options.system_prompt}
        asked = [[told, {"role": "user", "content": row["prompt"]}] for row in rows]
        rows = [{"prompt": prompt, "answer": row["answer"]} for prompt, row in zip(asked, rows, strict=True)]
    else:
        rows = [{"prompt": row["prompt"]} for row in rows]
    wanted = options.prompts_per_step * options.steps
    config = GRPOConfig(
        output_dir=os.path.join(os.path.dirname(options.marks), "trl"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=options.prompts_per_step * options.group_size,
        gradient_accumulation_steps=1,
        num_generations=options.group_size,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        learning_rate=1e-9,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        optim="adamw_torch",
        dataloader_num_workers=0,
        disable_tqdm=True,
        use_vllm=not options.alone,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.15,
        vllm_max_model_length=256,
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=by_answer if options.system_prompt else by_ids,
        args=config,
        train_dataset=Dataset.from_list((rows * (wanted // len(rows) + 1))[:wanted]),
        callbacks=[Marks(options.marks)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
