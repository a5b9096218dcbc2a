"""`python -m makespan.integrations.verl`: the overrides that switch the plug-ins on in a verl command line."""

from makespan.integrations.verl import agent_loop_config, router_config

OVERRIDES = f"""\
actor_rollout_ref.rollout.router_config_path={router_config()}
actor_rollout_ref.rollout.agent.agent_loop_config_path={agent_loop_config()}
actor_rollout_ref.rollout.agent.default_agent_loop=makespan_env
trainer.v1.sampler.custom_sampler.path=pkg://makespan.integrations.verl.sampler
trainer.v1.sampler.custom_sampler.name=MakespanReplayBuffer"""


def main() -> None:
    print(OVERRIDES)


if __name__ == "__main__":
    main()
