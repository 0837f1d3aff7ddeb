"""Imported by the server that rank processes are forked from, so that they share the imports, which take longest."""

from asyncrl.trainer.megatron import cpu

cpu.import_megatron()

import asyncrl.trainer.megatron.models  # noqa: E402
import asyncrl.trainer.megatron.publication  # noqa: E402, F401
