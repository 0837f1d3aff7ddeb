"""Runs users' code (rewards, tools) in subprocesses, so that a call that hangs or crashes ends alone.

Runs in: rollouter, reward and tool processes.

`WorkerPool` is the owner's side; each process runs `worker_loop.serve`.
"""
