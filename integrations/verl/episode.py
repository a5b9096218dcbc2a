"""What happens to one trajectory in verl: its state, its counters and the clock they are read on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from makespan.integrations.verl.figures import TrajectoryFigures
from makespan.integrations.verl.transcript import Transcript
from makespan.rollout.environment import ActionTiming
from makespan.rollout.trajectory import Progress


@dataclass
class Episode:
    """One trajectory while it runs. A trajectory that nobody ends was cut: `truncated` is where it starts."""

    trajectory_id: str
    group: str
    weights_version: int
    """verl's version of the weights that this step's rollout uses (the number of the last finished step)."""
    clock: Callable[[], float]
    state: Literal["finished", "truncated", "failed"] = "truncated"
    failure: str = ""
    failure_message: str = ""
    transcript: Transcript | None = None
    reward: float = 0.0
    turns: int = 0
    observations: int = 0
    """Observations that the context holds, after the first."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int | None = 0
    recomputed_tokens: int | None = 0
    preemptions: int | None = 0
    admission_s: float = 0.0
    generate_s: float = 0.0
    slot_queue_s: float = 0.0
    environment_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.min_weights_version = self.weights_version
        self.max_weights_version = self.weights_version
        self.weights_changed = False  # before or with the last turn, which may have waited for that at its replica
        self.expected_tokens = 0  # of the last turn's prompt: cached, if its replica had lost nothing
        self.earlier_prompt_tokens = 0  # of the turn before the last one
        self._last_prompt_tokens = 0
        self._computed_tokens = 0  # of this trajectory's context, computed by some replica so far

    def acted(self, timing: ActionTiming) -> None:
        """An environment action or a reset is over."""
        self.slot_queue_s += timing.queue_s
        self.environment_s += timing.service_s

    def generated(self, token_ids: Sequence[int], output: Any, *, prompt_tokens: int, elapsed_s: float) -> None:
        """A turn was generated; `output` is verl's `TokenOutput`."""
        versions = output.extra_fields
        first, last = versions.get("min_global_steps"), versions.get("max_global_steps")
        self.weights_changed = last is not None and (first != last or int(last) != self.max_weights_version)
        if self.turns == 0 and first is not None:
            self.min_weights_version = int(first)
        if last is not None:
            self.max_weights_version = int(last)
        cached = versions.get("num_cached_tokens")
        self.expected_tokens = min(self._computed_tokens, prompt_tokens)
        self.earlier_prompt_tokens, self._last_prompt_tokens = self._last_prompt_tokens, prompt_tokens
        if cached is None or self.cached_tokens is None or self.recomputed_tokens is None:
            self.cached_tokens = self.recomputed_tokens = None
        else:
            self.cached_tokens += cached
            self.recomputed_tokens += max(0, self.expected_tokens - cached)
        if output.num_preempted is None or self.preemptions is None:
            self.preemptions = None
        else:
            self.preemptions += output.num_preempted
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += len(token_ids)
        self._computed_tokens = prompt_tokens + len(token_ids) - 1  # the last token was sampled, not yet computed
        self.generate_s += elapsed_s
        self.turns += 1

    def fail(self, kind: str, error: Exception) -> None:
        self.state, self.failure, self.failure_message = "failed", kind, f"{kind}: {error}"
        self.reward = 0.0

    def progress(self, *, max_turns: int, max_tokens: int) -> Progress:
        """What is known so far, for the environment's queue."""
        context = len(self.transcript.token_ids) if self.transcript else 0
        return Progress(
            turns=self.turns,
            prompt_tokens=context - self.generated_tokens,
            generated_tokens=self.generated_tokens,
            elapsed_s=self.clock() - self.started_s - self.admission_s,
            environment_s=self.environment_s,
            max_turns=max_turns,
            max_tokens=max_tokens,
            group=self.group,
        )

    def figures(self) -> TrajectoryFigures:
        return TrajectoryFigures(
            state=self.state,
            failure=self.failure,
            turns=self.turns,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            completion_s=self.clock() - self.started_s,
            admission_s=self.admission_s,
            generate_s=self.generate_s,
            slot_queue_s=self.slot_queue_s,
            environment_s=self.environment_s,
        )

    def reward_fields(self) -> dict[str, float]:
        """verl's `reward_extra_info`: the same keys for every trajectory, failed ones included."""
        return {
            "score": self.reward,
            "finished": float(self.state == "finished"),
            "failed": float(self.state == "failed"),
        }
