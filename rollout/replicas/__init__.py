"""Inference replicas: the protocol that the engine knows, and the back ends behind it."""
