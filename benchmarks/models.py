"""Whether engines sample what the trainer trains, for every family of tests/families.json: three steps in mode sync.

    python benchmarks/models.py                     # all without a result, a minute each; docs/models.md shows them
    python benchmarks/models.py --engine torch mixtral gpt_oss

Each family is a tiny checkpoint of random weights. The reward has variance, so that weights move and are published. The
result is the largest absolute difference of log-probabilities at lag 0 (nats a token, mean of a step) in float32, else
in bfloat16, else the reason why the run ended. It goes to benchmarks/results/models.json as each run ends. Models that
read images need the build of torchvision that fits torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks/results/models.json"
REWARD = "def varied(response, row):\n    return len(response) % 7 / 7\n"
RUN = [
    *("mode=sync", "run.max_steps=3", "eval.every_steps=0", "batch.groups_per_step=4", "batch.group_size=4"),
    *("trainer.lr=0.01", "reward.function=varied_reward:varied"),
]
REFUSED = re.compile(r"^found: +(.+)$", re.MULTILINE)
PARITY = re.compile(r"log-probabilities differ by [\d.e-]+ nats a token")
CAUSE = re.compile(r"\((\w+(?:Error|Exception): [^)]+)\)")


def write_model(name: str, where: Path) -> None:
    """A checkpoint with the tokenizer of the quickstart's model."""
    from tests.numerics.test_models import model_of
    from tools.make_tiny_model import build_tokenizer

    model, tokenizer = model_of(name), build_tokenizer()
    ends = tokenizer.get_vocab()
    model.generation_config.eos_token_id = [ends["<|im_end|>"]]
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)


def run(name: str, engine: str, dtype: str) -> tuple[bool, str]:
    """Whether the run came through, and its result or the reason."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_model(name, place / "model")
        (place / "varied_reward.py").write_text(REWARD)
        words = [f"model.path={place / 'model'}", f"run.dir={place / 'run'}", f"rollout.engine={engine}"]
        command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *RUN, *words]
        paths = os.pathsep.join(filter(None, [str(place), str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, f"model.inference_dtype={dtype}"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            lines = (place / "run/metrics.jsonl").read_text().splitlines()
            return True, f"{max(abs(json.loads(line)['lag/kl/0']) for line in lines):.0e}"
    said = done.stdout + done.stderr
    for pattern in (PARITY, CAUSE, REFUSED):
        if found := pattern.findall(said):
            return False, found[0][:110]
    return False, f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all without a result")
    parser.add_argument("--engine", default="vllm", choices=("torch", "vllm"))
    arguments = parser.parse_args()
    key = {"torch": "torch_run", "vllm": "vllm"}[arguments.engine]
    names = arguments.families or [
        name for name, found in json.loads(RESULTS.read_text()).items()
        if key not in found and found["trainer"].startswith(("packed", "padded"))
    ]  # fmt: skip
    for name in names:
        came, text = run(name, arguments.engine, "float32")
        if not came and not text.startswith("log-prob"):
            again, in_16_bits = run(name, arguments.engine, "bfloat16")
            came, text = (True, f"{in_16_bits} in bfloat16") if again else (False, text)
        results = json.loads(RESULTS.read_text())
        results[name][key] = text
        rows = ",\n".join(f"  {json.dumps(n)}: {json.dumps(found)}" for n, found in sorted(results.items()))
        RESULTS.write_text("{\n" + rows + "\n}\n")
        print(name, text, flush=True)


if __name__ == "__main__":
    main()
