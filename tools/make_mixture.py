"""Makes a mixture of experts of a Qwen3: each feed-forward block becomes experts that are copies of it.

    python tools/make_mixture.py --model runs/tiny-qwen3 --out runs/tiny-mixture --experts 4

Before training the mixture computes what the model did: its experts are equal, and the weights of a token's experts sum
to 1. The router is random, so that experts see different tokens and become different ones. Weights are float32.

Source: Sparse Upcycling (arXiv:2212.05055), without noise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from asyncrl.data.model_files import check_model
from asyncrl.errors import ConfigError, explain


def make_mixture(source: Path, out: Path, *, experts: int, per_token: int) -> None:
    """Writes the mixture with everything else of `source`. Raises ConfigError: `source` is no Qwen3, or the numbers do
    not fit."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    asked = f"a mixture of {experts} experts, {per_token} for each token, of {source}"
    if not 1 <= per_token <= experts:
        raise ConfigError(
            explain(asked, "a token takes 1 to all experts", "choose --per-token between 1 and --experts")
        )
    if (found := check_model(str(source), "--model").model_type) != "qwen3":
        raise ConfigError(explain(asked, f"its architecture is {found}", "name a model of type qwen3"))
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    sizes = {k: v for k, v in dense.config.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
    config = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=dense.config.intermediate_size,
        num_experts=experts,
        num_experts_per_tok=per_token,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    mixture = Qwen3MoeForCausalLM(config)
    weights, state = dense.state_dict(), mixture.state_dict()
    for name, target in state.items():
        if name in weights:
            target.copy_(weights[name])
        elif name.endswith("mlp.experts.gate_up_proj"):
            place = name.removesuffix("experts.gate_up_proj")
            target.copy_(torch.cat([weights[f"{place}{part}_proj.weight"] for part in ("gate", "up")]))
        elif name.endswith("mlp.experts.down_proj"):
            target.copy_(weights[name.replace("experts.down_proj", "down_proj.weight")])
        else:
            assert name.endswith("mlp.gate.weight"), name
    weightless = shutil.ignore_patterns("*.safetensors", "*.index.json", "tiny_model.json", "config.json")
    shutil.copytree(source, out, ignore=weightless, dirs_exist_ok=True)
    mixture.save_pretrained(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("runs/tiny-qwen3"), help="a Qwen3 (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-mixture"), help="directory to write")
    parser.add_argument("--experts", type=int, default=4, help="of each layer (default %(default)s)")
    parser.add_argument("--per-token", type=int, default=2, help="experts that a token takes (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        make_mixture(options.model, options.out, experts=options.experts, per_token=options.per_token)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
