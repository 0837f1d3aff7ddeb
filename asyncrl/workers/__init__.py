"""Code of users in subprocesses, so that a call that hangs or crashes ends alone. Rewards and tools run this way.

Runs in: rollouter, reward and tool processes.

`WorkerPool` is the owner's side; each process runs `worker_loop.serve`.
"""
