"""Where makespan meets other libraries: transformers, verl and W&B."""
