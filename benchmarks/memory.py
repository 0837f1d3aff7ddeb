"""The memory that a plan announces for a trainer rank against torch's memory tracker, for layouts of real size.

    python benchmarks/memory.py [--only N] [--write]

The tracker follows the project's own sharding and passes over fake tensors: no GPU, and no memory for the models.
The announced figure is `trainer/fsdp/memory.py`'s, which a dry run prints and a run that does not fit is refused by.
Writes benchmarks/results/memory.md with --write.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.trainer import FsdpConfig, TrainerConfig
from asyncrl.trainer.backends import memory_of
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.types import ModelFacts
from asyncrl_testing.memory_tracker import tracked_peak

RESULT = Path(__file__).resolve().parent / "results" / "memory.md"
GIB = 1 << 30


def config_of(kind: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **other,
    }


QWEN25_7B = config_of("qwen2", 3584, 18944, 28, 28, 4, vocab_size=152064)
QWEN25_32B = config_of("qwen2", 5120, 27648, 64, 40, 8, vocab_size=152064)
QWEN3_06B = config_of("qwen3", 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True)
QWEN3_8B = config_of("qwen3", 4096, 12288, 36, 32, 8, head_dim=128)
LLAMA_8B = config_of("llama", 4096, 14336, 32, 32, 8, vocab_size=128256)
QWEN3_30B_A3B = config_of(
    "qwen3_moe", 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
)


@dataclass(frozen=True)
class Layout:
    name: str
    config: dict[str, Any]
    num_ranks: int
    tokens: int
    fsdp: dict[str, Any] = field(default_factory=dict)
    recompute: Literal["none", "selective", "full"] = "full"

    @property
    def trainer(self) -> TrainerConfig:
        fsdp = FsdpConfig(**{"param_dtype": "bfloat16", **self.fsdp})
        return TrainerConfig(num_ranks=self.num_ranks, recompute=self.recompute, fsdp=fsdp)


LAYOUTS = [
    Layout("Qwen2.5-32B, 8 ranks", QWEN25_32B, 8, 22528),
    Layout("Qwen2.5-32B, 16 ranks", QWEN25_32B, 16, 22528),
    Layout("Qwen2.5-7B, 4 ranks", QWEN25_7B, 4, 18432),
    Layout("Qwen3-8B, 8 ranks", QWEN3_8B, 8, 34816),
    Layout("Qwen3-8B, 8 ranks, nothing recomputed", QWEN3_8B, 8, 8192, recompute="none"),
    Layout("Qwen3-8B, 8 ranks, all but attention recomputed", QWEN3_8B, 8, 34816, recompute="selective"),
    Layout("Llama-3-8B, 8 ranks", LLAMA_8B, 8, 16384),
    Layout("Qwen3-0.6B, 1 rank, float32", QWEN3_06B, 1, 8192, {"param_dtype": "float32"}),
    Layout("Qwen3-30B-A3B, 8 ranks", QWEN3_30B_A3B, 8, 18432),
    Layout("Qwen3-8B, 8 ranks, 4 share a row", QWEN3_8B, 8, 69632, {"context_parallel": 4}),
    Layout(
        "Qwen2.5-7B, 28 ranks, which share a row: copies of key heads", QWEN25_7B, 28, 131072, {"context_parallel": 28}
    ),
]


def announced(layout: Layout) -> int:
    facts = ModelFacts.of_config("model", layout.config)
    tensors = model_tensors(facts)
    assert tensors is not None, "its tensors are known"
    experts = facts.sizes.experts_per_token or 1
    found = memory_of(
        layout.trainer, tensors, critic=False, reference=False, tokens=layout.tokens, experts_per_token=experts
    )
    assert found[0].peak is not None, "for a number of tokens"
    return found[0].peak


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--only", type=int, default=len(LAYOUTS), metavar="N", help="the first N layouts")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# Memory of a trainer rank: announced against tracked",
        "",
        "`python benchmarks/memory.py`",
        "",
        f"Commit {git_commit()}; {versions}. bfloat16 passes over float32 weights with every layer recomputed, where "
        "nothing else is said; an update with two full micro-batches.",
        "",
        "| layout | tokens | announced, GiB | tracked, GiB | ratio |",
        "|---|---|---|---|---|",
    ]
    for layout in LAYOUTS[: options.only]:
        began = time.time()
        expected, tracked = announced(layout), tracked_peak(layout.config, layout.trainer, layout.tokens)
        figures = f"{expected / GIB:.1f} | {tracked / GIB:.1f} | {expected / tracked:.3f}"
        lines.append(f"| {layout.name} | {layout.tokens} | {figures} |")
        print(lines[-1], f"{time.time() - began:.0f} s", flush=True)
    text = "\n".join(lines) + "\n"
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
