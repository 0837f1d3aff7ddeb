"""Evaluation: what single responses add up to."""

from asyncrl.evaluation.result import Answer, EvalResult, is_correct, summarise
from asyncrl.evaluation.statistics import mean_interval, pass_at_k, wilson_interval

__all__ = ["Answer", "EvalResult", "is_correct", "mean_interval", "pass_at_k", "summarise", "wilson_interval"]
