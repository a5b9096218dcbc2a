"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard (needs the extra `makespan[bfcl]`)."""

from makespan.envs.bfcl.data import CATEGORIES, BfclNotInstalled, tasks
from makespan.envs.bfcl.environment import BfclEnvironment
from makespan.envs.bfcl.script import script

__all__ = ["CATEGORIES", "BfclEnvironment", "BfclNotInstalled", "script", "tasks"]
