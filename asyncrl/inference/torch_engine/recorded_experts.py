"""What the routers of a mixture choose while the embedded engine decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncrl.weights.experts import routers_of


class ExpertRecorder:
    """Keeps what the routers chose in one forward pass at a time. Owns a hook on each router.

    Attributes:
        row: (L, k): layers with experts, and experts of a token in each; None of a model without routers.
    """

    def __init__(self, model: Any) -> None:
        routers = routers_of(model)
        self.row = (len(routers), int(model.config.num_experts_per_tok)) if routers else None
        self._is_on = False
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    def begin(self) -> None:
        """From now on the routers are listened to."""
        self._is_on = True

    def end(self) -> np.ndarray:
        """[tokens, L, k] int16: the choices since `begin`, a single forward pass."""
        self._is_on = False
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, dim=1).cpu().numpy().astype(np.int16)

    def _keep(self, router: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        if self._is_on:
            self._chosen.append(output[2])
