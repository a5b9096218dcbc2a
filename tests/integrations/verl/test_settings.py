"""What a user writes is checked once, and a mistake is named."""

from __future__ import annotations

import pytest
import yaml

from makespan.integrations.verl import agent_loop_config, router_config
from makespan.integrations.verl.settings import LoopSettings, RouterSettings, SamplerSettings, parse
from makespan.rollout.errors import ConfigError


def test_the_shipped_router_yaml_holds_valid_settings() -> None:
    written = yaml.safe_load(router_config().read_text())
    assert written.pop("router_class") == "makespan.integrations.verl.router.TrajectoryRouterActor"
    settings = parse(RouterSettings, written, "router.yaml")
    assert (settings.policy, settings.memory) == ("cost", None)


def test_a_replicas_memory_is_the_plans_figures() -> None:
    plan = {"num_blocks": 101, "block_tokens": 528, "recurrent_groups": 9}
    settings = parse(RouterSettings, {"memory": plan}, "router.yaml")
    assert settings.memory is not None
    memory = settings.memory.memory()
    assert memory.capacity == 100  # without vLLM's null block
    assert memory.held(529) == 2 + 2 * 9  # two blocks of attention, and a state and its checkpoint in every group
    assert memory.kept(1_060, 1_100) == (1_056, 2 + 9)


def test_without_prefix_caching_a_replica_has_no_checkpoints_and_keeps_nothing() -> None:
    plan = {"num_blocks": 101, "block_tokens": 528, "recurrent_groups": 9, "prefix_caching": False}
    settings = parse(RouterSettings, {"memory": plan}, "router.yaml")
    assert settings.memory is not None
    memory = settings.memory.memory()
    assert memory.held(529) == 2 + 9
    assert memory.kept(1_060, 1_100) == (0, 0)


@pytest.mark.parametrize(
    ("memory", "named"),
    [({"num_blocks": 1, "block_tokens": 16}, "num_blocks"), ({"num_blocks": 9}, "block_tokens"),
     ({"num_blocks": 9, "block_tokens": 16, "states": 1}, "states")],
)  # fmt: skip
def test_a_memory_that_cannot_be_is_refused_by_name(memory: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"router\.yaml: .*{named}"):
        parse(RouterSettings, {"memory": memory}, "router.yaml")


def test_the_shipped_agent_loop_yaml_holds_valid_settings_below_the_samplers_deadline() -> None:
    (entry,) = yaml.safe_load(agent_loop_config().read_text())
    assert entry.pop("name") == "makespan_env"
    assert entry.pop("_target_") == "makespan.integrations.verl.agent_loop.EnvAgentLoop"
    settings = parse(LoopSettings, entry, "agent_loops.yaml")
    assert settings.reward == "environment"
    assert settings.trajectory_deadline_s < SamplerSettings().deadline_s


def test_an_unknown_key_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"the YAML: unknown key 'max_turn' \(did you mean 'max_turns'\?\)"):
        parse(LoopSettings, {"address": "tcp://x:1", "max_turn": 3}, "the YAML")


def test_a_wrong_type_and_a_missing_key_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        parse(SamplerSettings, {"deadline_s": "soon"}, "sampler_kwargs")
    with pytest.raises(ConfigError, match="address"):
        parse(LoopSettings, {}, "the YAML")
