"""The peak memory that a plan announces for an FSDP2 rank, against torch's memory tracker over fake tensors."""

from dataclasses import replace

import pytest

from asyncrl_testing.memory_tracker import tracked_peak
from benchmarks.memory import LAYOUTS, announced

FEW_LAYERS = 6
SHORT = [
    replace(layout, config={**layout.config, "num_hidden_layers": FEW_LAYERS})
    for layout in LAYOUTS
    if "16 ranks" not in layout.name
]


@pytest.mark.parametrize(
    "layout",
    [SHORT[1], *(pytest.param(layout, marks=pytest.mark.slow) for layout in (SHORT[0], *SHORT[2:]))],
    ids=lambda layout: layout.name,
)
def test_what_is_announced_is_within_a_tenth_of_what_the_tracker_sees(layout):
    assert announced(layout) == pytest.approx(tracked_peak(layout.config, layout.trainer, layout.tokens), rel=0.1)
