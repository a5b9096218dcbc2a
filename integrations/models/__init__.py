"""Small models for a first run: the embedded hybrid model, and SmolLM2 out of a package.

`resolve(name)` turns what a user wrote after `--model` into a directory that transformers and vLLM can load.
"""

from makespan.integrations.models.resolve import resolve

__all__ = ["resolve"]
