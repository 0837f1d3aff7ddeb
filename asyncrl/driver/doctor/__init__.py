"""Examines a machine and a recipe before a run: what will not work, what may not, and what to do about it.

Runs in: the command.

Every check measures or tries what the run will need; none reads a list of versions that are said to work.
"""

from asyncrl.driver.doctor.examination import examine
from asyncrl.driver.doctor.machine import Observation, Status

__all__ = ["Observation", "Status", "examine"]
