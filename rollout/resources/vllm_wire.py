"""What is asked of vLLM about a model's memory, and what it answers: JSON over a child's standard input and output.

vLLM is asked in a child process because the question bends it: a model without weights on a meta device, a GPU's rules
on a machine without one. The child imports vLLM, `ask` does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec

from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, Platform
from makespan.rollout.resources.profile import Turns
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.simulation.cost import InferenceCost

ASK_TIMEOUT_S = 120.0


class VllmUnavailable(ResourceError):
    """vLLM is not installed, does not serve the model, or did not answer in time. The closed form may still know it."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """A batch for vLLM's own scheduler with a model that computes nothing."""

    settings: CacheSettings
    num_blocks: int
    trajectories: tuple[Turns, ...]
    concurrency: int
    """Trajectories at once; the next starts when one ends."""
    max_num_seqs: int = 1024
    cost: InferenceCost = InferenceCost()
    limit_s: float = 30.0
    """Of real time; what was not served by then is left out."""


class ServedTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What became of a turn, in the order of their ends."""

    trajectory: int
    turn: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler did."""

    turns: tuple[ServedTurn, ...]
    preemptions: int
    computed_tokens: int
    peak_blocks: int
    """Blocks held by running sequences at most."""
    allocated_blocks: int
    """Blocks that were handed out, one that was used twice twice."""
    simulated_s: float
    complete: bool
    """False: `limit_s` ended it."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Directory that holds `config.json`, or that file."""
    tensor_parallel: int
    platform: Platform
    settings: tuple[CacheSettings, ...]
    max_model_len: int
    max_num_batched_tokens: int
    plays: tuple[Play, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    footprints: tuple[ModelFootprint, ...]
    """One for each of the question's settings."""
    played: tuple[Played, ...]
    took_s: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    refusal: str


_decoder: msgspec.json.Decoder[tuple[Answer | Refusal, ...]] = msgspec.json.Decoder(tuple[Answer | Refusal, ...])


def vllm_is_installed() -> bool:
    """Whether there is a vLLM to ask."""
    return find_spec("vllm") is not None


def ask(question: Question, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
    """Ask vLLM in a child process. Raises `VllmUnavailable` with the reason."""
    (answer,) = ask_all([question], timeout_s)
    if isinstance(answer, Refusal):
        raise VllmUnavailable(f"vLLM: {answer.refusal}")
    return answer


def ask_all(questions: Sequence[Question], timeout_s: float = ASK_TIMEOUT_S) -> tuple[Answer | Refusal, ...]:
    """Ask several questions of one child process; all for the same platform. Raises `VllmUnavailable`."""
    if not vllm_is_installed():
        raise VllmUnavailable("vLLM is not installed")
    command = [sys.executable, "-m", "makespan.rollout.resources.vllm_specs"]
    try:
        child = subprocess.run(
            command,
            input=msgspec.json.encode(questions),
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VllmUnavailable(f"vLLM did not answer in {timeout_s:.0f} s") from None
    try:
        return _decoder.decode(child.stdout)
    except msgspec.MsgspecError:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        raise VllmUnavailable(f"vLLM's child process ended with {child.returncode}: {last[0]}") from None
