"""Code of users in subprocesses, so that a call that hangs or crashes ends alone: `WorkerPool` on the owner's side,
`worker_loop.serve` in each process. Rewards and tools run this way."""
