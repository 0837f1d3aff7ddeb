"""Probes the installed SGLang: `python -m asyncrl.inference.sglang.probe [--keep] [--experts] [--model ARCHITECTURE]
[SERVER_ARGUMENT...]`.

Exit code 0: SGLang is usable, also for everything asked (--keep: rollout.interrupt=keep, --experts: record_experts). 2:
it is not; stdout has the reason.
"""

from __future__ import annotations

import argparse
import os
import sys

from asyncrl.errors import ConfigError
from asyncrl.inference.sglang.support import (
    EXPERTS,
    KEEP,
    MODEL,
    check_architecture,
    check_experts,
    check_keep,
    check_server_args,
    check_sglang,
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(KEEP, action="store_true")
    parser.add_argument(EXPERTS, action="store_true")
    parser.add_argument(MODEL)
    parser.add_argument("server_args", nargs="*")
    asked = parser.parse_args()
    import torch

    # Must be set before the checks below import SGLang.
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        check_sglang()
        check_server_args(asked.server_args)
        if asked.keep:
            check_keep()
        if asked.experts:
            check_experts()
        if asked.model is not None:
            check_architecture(asked.model, os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
