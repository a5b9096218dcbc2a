"""The rollout engine: trajectories, the gates they pass, the replicas that serve them and what is measured of them."""
