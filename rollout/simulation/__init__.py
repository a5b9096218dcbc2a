"""Simulation: the shipping engine, gates and policies on a clock that jumps, with a calibrated cost of inference."""
