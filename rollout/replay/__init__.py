"""Recorded work: the trace format, what writes and reads it, and the environment and agent that play it again."""
