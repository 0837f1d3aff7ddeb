"""Processes without a GPU load neither torch nor an engine."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("asyncrl.algorithms, asyncrl.trainer.packing; asyncrl.algorithms.build_advantage('grpo')", {"ray"}),
        ("asyncrl.driver.fleet.trainer_pool", set()),
        ("asyncrl.inference.vllm", {"vllm", "ray"}),
        ("asyncrl.inference.sglang", {"sglang", "ray"}),
        ("asyncrl.weights.plan, asyncrl.weights.transport", set()),
    ],
)
def test_a_module_loads_no_torch(code, unwanted):
    code = f"import sys, {code}; assert not {unwanted | {'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
