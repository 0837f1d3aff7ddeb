"""The result of a held-out evaluation: accuracy, mean@k and pass@k with their intervals, from judged responses.

Runs in: rollouter.
"""

from asyncrl.rollout.evaluation.result import Answer, is_correct, summarise
from asyncrl.rollout.evaluation.statistics import mean_interval, pass_at_k, wilson_interval
from asyncrl.types import EvalResult

__all__ = ["Answer", "EvalResult", "is_correct", "mean_interval", "pass_at_k", "summarise", "wilson_interval"]
