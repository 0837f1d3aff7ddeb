"""`asyncrl-plan RECIPE`: predicts step time, idle shares, lag and the cost of publishes on a virtual clock.

Runs in: its own command.
"""

from asyncrl.plan.costs import CostModel, read_costs, write_costs
from asyncrl.plan.forecast import Forecast, Row, predict

__all__ = ["CostModel", "Forecast", "Row", "predict", "read_costs", "write_costs"]
