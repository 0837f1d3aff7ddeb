"""Probes the installed SGLang: `python -m asyncrl.inference.sglang.probe [--keep] [SERVER_ARGUMENT...]`.

Exit code 0: it can be used, for rollout.interrupt=keep too if asked, and knows these arguments. 2: it cannot; the
reason is on stdout.
"""

from __future__ import annotations

import os
import sys

from asyncrl.errors import ConfigError
from asyncrl.inference.sglang.support import KEEP, check_keep, check_server_args, check_sglang


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        check_sglang()
        check_server_args([name for name in sys.argv[1:] if name != KEEP])
        if KEEP in sys.argv:
            check_keep()
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
