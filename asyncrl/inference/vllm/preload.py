"""What the fork server imports: all that EngineCore needs. Only `fork_server` names this module."""

from __future__ import annotations

import gc
import importlib
import sys

_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "asyncrl.inference.vllm.weight_transfer",
)

sys.path[:] = [place for place in sys.path if place]  # not the working directory: a module of the user's is not meant
gc.disable()  # collections among a million objects that stay take a quarter of the time
try:
    for _name in _MODULES:
        importlib.import_module(_name)
finally:
    gc.enable()
    gc.freeze()
