"""`python -m sglang.launch_server` as somebody would start it for `rollout.engine=remote`, on a CPU."""

import os
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.server_process import ServerProcess

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--disable-overlap-schedule", "--skip-tokenizer-init", "--incremental-streaming-output", "--stream-interval", "1",
    "--enable-custom-logit-processor", "--max-running-requests", "32", "--max-total-tokens", "32768",
    "--mem-fraction-static", "0.1", "--watchdog-timeout", "86400", "--log-level", "warning",
)  # fmt: skip
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "asyncrl_sglang_models",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "OMP_NUM_THREADS": "1",
}


class SglangServer(ServerProcess):
    """Runs with `tests/sglang_cpu`, which stands in for SGLang's kernels."""

    def __init__(self, model: Path, log: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.model = model
        more = (str(ROOT / "tests" / "sglang_cpu"), str(ROOT), os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, more))
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS, *flags]
        super().__init__(command, log, ENVIRONMENT | {"PYTHONPATH": path} | (environment or {}))
