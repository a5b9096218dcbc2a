"""makespan: a rollout backend that makes the last trajectory of a batch end sooner.

The package's parts live in the repository's root directories (`rollout`, `envs`, `integrations`) and are reached
through this package: `makespan.rollout`, `makespan.envs`, `makespan.integrations`.
"""

__version__ = "0.1.0"
