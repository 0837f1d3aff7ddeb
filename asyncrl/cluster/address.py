from __future__ import annotations

import os


def joined_address(address: str | None) -> str | None:
    """The cluster that a run joins, given `ray.address`; None: it starts one."""
    return address or os.environ.get("RAY_ADDRESS")
