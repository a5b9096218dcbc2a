"""What a model's memory is spent on, and how many trajectories it carries."""
