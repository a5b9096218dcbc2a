"""The configurations of the families of hybrid models, as small files."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
FAMILIES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_of(name: str) -> Path:
    """The configuration file of a family's model."""
    return CONFIGS / f"{name}.json"
