"""One request inside SGLang."""

from __future__ import annotations

import asyncio
import uuid

from asyncrl.inference.shared.stamped_stream import Output, StampedStream
from asyncrl.types import GenerationRequest


class SglangStream(StampedStream):
    """The adapter's record of one request to SGLang."""

    package = "SGLang"
    no_spans = (
        "it was sampled under two versions, and this SGLang does not say which token under which",
        "set rollout.interrupt=abort_resume, or install sglang>=0.5.19",
    )

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.rid = ""
        """Of the present attempt in SGLang."""

    def enter(self) -> None:
        self.rid = uuid.uuid4().hex
        super().enter()
