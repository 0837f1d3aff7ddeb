"""SGLang as an inference engine.

`engine` (in the replica) talks to `host` (a process of its own, which runs SGLang's Engine) through `host_process`;
`weight_loader` runs in SGLang's scheduler processes, one per GPU.

Runs in: the replica, and the processes below it.
"""
