"""makespan inside a verl trainer: thin shells that a stock verl 0.9.1 picks up from its configuration.

* `router.TrajectoryRouter` (`rollout.router_config_path`) places turns with makespan's routing policy;
* `agent_loop.EnvAgentLoop` (`rollout.agent.agent_loop_config_path`, agent `makespan_env`) runs a trajectory against an
  environment server;
* `sampler.MakespanReplayBuffer` (`trainer.v1.sampler.custom_sampler`) puts makespan figures into verl's log and bounds
  a step's waiting.

verl loads this package in every process of a job (entry-point group `verl.plugins`), in the middle of its own import.
So nothing happens here: no verl, Ray or torch is imported, and the modules above are imported by the processes that
use them. `router_config()` and `agent_loop_config()` give the paths of the shipped YAML files, and
`python -m makespan.integrations.verl` prints them.
"""

from __future__ import annotations

from pathlib import Path

VERL_VERSION = "0.9.1"
"""The version of verl that the shells are written for and tested with; `contract` checks what they rely on."""


def router_config() -> Path:
    """The shipped router configuration, for `actor_rollout_ref.rollout.router_config_path`."""
    return _shipped("router.yaml")


def agent_loop_config() -> Path:
    """The shipped agent-loop configuration, for `actor_rollout_ref.rollout.agent.agent_loop_config_path`."""
    return _shipped("agent_loops.yaml")


def _shipped(name: str) -> Path:
    return Path(__file__).resolve().parent / name
