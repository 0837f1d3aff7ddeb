from __future__ import annotations

import os


def joined_address(address: str | None) -> str | None:
    """The cluster that a run joins, given `ray.address`; None: it starts one."""
    return address or os.environ.get("RAY_ADDRESS")


def visible_gpus() -> frozenset[str] | None:
    """Numbers or ids of the GPUs that processes of this machine may use; None: all of them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else frozenset(word.strip() for word in named.split(",") if word.strip())
