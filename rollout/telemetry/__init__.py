"""The event log of a run, its merged view, and everything computed from it."""
