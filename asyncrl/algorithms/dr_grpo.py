"""Advantage of Dr. GRPO: how much better a trajectory did than its siblings, in units of reward.

    A_i = r_i - mean(r)

It differs from GRPO in that the spread does not divide: with it, questions that are too easy or too hard get more
weight than the objective gives them. The other half of Dr. GRPO is `algorithm.aggregation=fixed`, by which long wrong
responses are no longer cheaper per token than short ones.
Source: Understanding R1-Zero-like training (arXiv:2503.20783) sec. 3.
"""

from __future__ import annotations

from asyncrl.algorithms.group_rewards import centred

dr_grpo_advantages = centred
