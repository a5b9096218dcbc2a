"""The engine's promises: every trajectory ends once and gives back what it held, and its tokens are kept exactly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from makespan.rollout.admission import make_admission
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.agent import ModelAgent, ScriptAgent
from makespan.rollout.conversation import Conversation
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import ReplicaFailure, TransitionError
from makespan.rollout.replicas.base import Request
from makespan.rollout.routing import StickyLeastInflight
from makespan.rollout.runner import Limits
from makespan.rollout.scheduling import action_policy
from makespan.rollout.telemetry.events import Event, EventLog
from makespan.rollout.telemetry.merge import read_log
from makespan.rollout.trajectory import Task, Trajectory, TrajectoryState

from .fakes import END, CharacterTokenizer, PlannedEnvironments, RuleReplica, task

LIMITS = Limits(max_turns=50, max_context_tokens=10_000, trajectory_timeout_s=None)


def say(text: str) -> list[int]:
    return [*map(ord, text), END]


class Rig:
    """An engine over fakes, with its parts at hand."""

    def __init__(
        self,
        *,
        environments: PlannedEnvironments | None = None,
        replicas: list[RuleReplica] | None = None,
        concurrency: int | None = None,
        limits: Limits = LIMITS,
        scripts: dict[str, tuple[str, ...]] | None = None,
        log: Path | None = None,
    ) -> None:
        self.environments = environments or PlannedEnvironments()
        self.replicas = replicas or [RuleReplica("replica-0", lambda _: say("ok"))]
        self.router = StickyLeastInflight([r.replica_id for r in self.replicas], rng=random.Random(0))
        self.admission = make_admission("fixed", concurrency)
        self.conversation = Conversation(CharacterTokenizer())
        self.log = log
        self._limits = limits
        self._scripts = scripts

    def build(self) -> RolloutEngine:
        agent: ModelAgent | ScriptAgent
        if self._scripts is None:
            agent = ModelAgent(self.conversation, max_tokens=64, temperature=0.0, top_p=1.0, seed=0)
        else:
            agent = ScriptAgent(self.conversation, self._scripts, temperature=0.0)
        self.events = EventLog(self.log, "engine", clock=asyncio.get_running_loop().time)
        return RolloutEngine(
            replicas={replica.replica_id: replica for replica in self.replicas},
            router=self.router,
            admission=self.admission,
            environments=self.environments,
            agent=agent,
            conversation=self.conversation,
            coordinator=Coordinator(),
            scheduling=action_policy("fifo", Coordinator()),
            limits=self._limits,
            events=self.events,
        )

    def run(self, tasks: list[Task], samples: int = 1):
        async def go():
            engine = self.build()
            results = await engine.run(tasks, samples_per_task=samples)
            self.events.close()
            return results

        return asyncio.run(go())

    def nothing_is_held(self) -> bool:
        statistics = self.admission.statistics()
        return (
            not self.environments.open_sessions
            and statistics.admitted == 0
            and statistics.waiting == 0
            and set(self.router.in_flight().values()) <= {0}
        )


def events_of(path: Path, kind: str) -> list[Event]:
    return [event for event in read_log(path).events if event.kind == kind]


def test_a_trajectory_alternates_inference_and_actions_until_the_environment_ends_it():
    rig = Rig()
    (result,) = rig.run([task("a", length=3)])
    assert result.state == TrajectoryState.FINISHED
    assert result.reward == 1.0
    assert [turn.action for turn in result.turns] == ["ok", "ok", "ok"]
    assert rig.environments.actions == {"a#0": ["ok", "ok", "ok"]}
    assert rig.nothing_is_held()


def hears(rig: Rig) -> list[ReturningTurn]:
    """What its admission is told of caches."""
    told: list[ReturningTurn] = []
    rig.admission.served = told.append
    return told


def test_admission_hears_what_every_turn_but_the_first_found_wherever_it_was_served():
    replicas = [RuleReplica(f"replica-{n}", lambda _: say("ok")) for n in range(2)]
    rig = Rig(replicas=replicas)
    rig.router.route = lambda request: f"replica-{request.turn % 2}"
    told = hears(rig)
    (result,) = rig.run([task("a", length=4)])
    assert result.state == TrajectoryState.FINISHED
    prompts = [len(replicas[turn % 2].prompts[turn // 2]) for turn in range(3)]
    # of the last token nothing is computed
    assert told == [(prompt, prompt + len(say("ok")) - 1, 0, 0) for prompt in prompts]


def test_a_cache_that_died_with_its_replica_was_not_overwritten():
    replicas = [RuleReplica(f"replica-{n}", lambda _: say("ok")) for n in range(2)]

    def kill(trajectory_id: str, step: int) -> None:
        replicas[0].dead = step >= 1

    rig = Rig(replicas=replicas, environments=PlannedEnvironments(on_step=kill))
    rig.router.route = lambda request: "replica-0" if "replica-0" in rig.router.in_flight() else "replica-1"
    told = hears(rig)
    (result,) = rig.run([task("a", length=5)])
    assert result.state == TrajectoryState.FINISHED
    assert [turn.replica_id for turn in result.turns] == ["replica-0"] * 2 + ["replica-1"] * 3
    assert len(told) == 3  # of the turns 1, 3 and 4


def test_each_prompt_begins_with_the_exact_ids_of_the_turn_before():
    replica = RuleReplica("replica-0", lambda request: say("x" * (request.turn + 1)))
    Rig(replicas=[replica]).run([task("a", length=4)])
    generated = [say("x" * turn) for turn in (1, 2, 3, 4)]
    for before, after, ids in zip(replica.prompts, replica.prompts[1:], generated, strict=False):
        assert after[: len(before) + len(ids)] == [*before, *ids]
    # By hand, with one id a character: the end mark was generated, so only the newline and the new message follow.
    expected = "<^>system:rules<|>\n<^>user:a<|>\n<^>assistant:x<|>\n<^>user:step 1<|>\n<^>assistant:"
    assert replica.prompts[1] == CharacterTokenizer().encode(expected, add_special_tokens=False)


def test_a_generation_cut_by_its_length_gets_the_missing_end_of_turn():
    replica = RuleReplica("replica-0", lambda _: [ord("x")])
    Rig(replicas=[replica]).run([task("a", length=2)])
    expected = "<^>system:rules<|>\n<^>user:a<|>\n<^>assistant:x<|>\n<^>user:step 1<|>\n<^>assistant:"
    assert replica.prompts[1] == CharacterTokenizer().encode(expected, add_special_tokens=False)


def test_the_result_keeps_ids_masks_and_log_probabilities_in_order():
    (result,) = Rig().run([task("a", length=2)])
    assert [(s.generated, len(s.token_ids)) for s in result.segments] == [
        (False, len("^system:rules|n^user:a|n^assistant:")),
        (True, 3),
        (False, len("n^user:step 1|n^assistant:")),
        (True, 3),
    ]
    assert [s.logprobs for s in result.segments] == [None, [-0.5] * 3, None, [-0.5] * 3]


def test_scripted_actions_force_the_length_and_replace_what_was_generated():
    replica = RuleReplica("replica-0", lambda request: [7] * request.sampling.max_tokens)
    rig = Rig(replicas=[replica], scripts={"a": ("hello", "bye")})
    (result,) = rig.run([task("a", length=2)])
    assert [(r.sampling.min_tokens, r.sampling.max_tokens) for r in replica.requests] == [(6, 6), (4, 4)]
    assert rig.environments.actions["a#0"] == ["hello", "bye"]
    assert 7 not in replica.prompts[1]
    assert say("hello") == replica.prompts[1][len(replica.prompts[0]) : len(replica.prompts[0]) + 6]
    assert [s.logprobs for s in result.segments if s.generated] == [None, None]


def test_a_script_that_is_too_short_fails_its_trajectory_and_says_why():
    rig = Rig(scripts={"a": ("hello",), "b": ("x", "y")})
    short, good = rig.run([task("a", length=2), task("b", length=2)])
    assert (short.state, good.state) == (TrajectoryState.FAILED, TrajectoryState.FINISHED)
    assert short.failure is not None
    assert "script of task 'a' has 1 actions" in short.failure.message


def test_samples_of_a_task_form_a_group():
    results = Rig().run([task("a"), task("b")], samples=3)
    assert [(r.trajectory_id, r.group) for r in results] == [(f"{g}#{i}", g) for g in "ab" for i in range(3)]


def test_admission_limits_how_many_run_at_once():
    replica = RuleReplica("replica-0", lambda _: say("ok"), seconds=0.001)
    rig = Rig(replicas=[replica], concurrency=3)
    rig.run([task(f"t{i}", length=2) for i in range(10)])
    assert replica.most_running == 3
    unlimited = RuleReplica("replica-0", lambda _: say("ok"), seconds=0.001)
    Rig(replicas=[unlimited]).run([task(f"t{i}", length=2) for i in range(10)])
    assert unlimited.most_running == 10


def test_a_refused_task_and_a_raising_session_fail_alone(tmp_path):
    def on_step(trajectory_id: str, step: int) -> None:
        if trajectory_id == "bad#0" and step == 1:
            raise EnvironmentFailure("raised", "ValueError: the sandbox fell over")

    rig = Rig(environments=PlannedEnvironments(on_step=on_step), log=tmp_path / "log.jsonl")
    refused, bad, good = rig.run([task("no", refuse=True), task("bad", length=3), task("good", length=3)])
    assert (refused.state, bad.state, good.state) == ("failed", "failed", "finished")
    assert (refused.failure.kind, bad.failure.kind) == ("refused", "raised")
    assert "fell over" in bad.failure.message
    assert refused.reward is None
    assert bad.reward is None  # not 0.0: a failure is not a score
    assert good.reward == 1.0
    assert len(bad.turns) == 1  # what it did before it failed is kept
    assert rig.nothing_is_held()
    assert {e.trajectory_id: e.data["state"] for e in events_of(tmp_path / "log.jsonl", "ended")} == {
        "no#0": "failed",
        "bad#0": "failed",
        "good#0": "finished",
    }


def losing(times: int, kind: str = "unknown_outcome") -> PlannedEnvironments:
    """An environment whose second action loses its session, `times` times."""
    left = [times]

    def on_step(trajectory_id: str, step: int) -> None:
        if step == 1 and left[0] > 0:
            left[0] -= 1
            raise EnvironmentFailure(kind, "the worker died while the action ran")

    return PlannedEnvironments(on_step=on_step)


def test_a_lost_session_begins_again_from_the_reset_as_often_as_configured(tmp_path):
    limits = Limits(max_turns=50, max_context_tokens=10_000, trajectory_timeout_s=None, restarts=2)
    rig = Rig(environments=losing(2), limits=limits, log=tmp_path / "log.jsonl")
    (result,) = rig.run([task("a", length=3)])
    assert (result.state, result.reward) == ("finished", 1.0)
    assert [turn.index for turn in result.turns] == [0, 1, 2]
    assert [segment.generated for segment in result.segments] == [False, True] * 3
    assert len(rig.replicas[0].requests) == 2 + 2 + 3
    assert len({request.request_id for request in rig.replicas[0].requests}) == 7
    assert [e.data["turn"] for e in events_of(tmp_path / "log.jsonl", "restarted")] == [1, 1]
    # Of the second attempt's first prompt everything was computed before (35 ids), and nothing was cached.
    assert events_of(tmp_path / "log.jsonl", "generate")[2].data["recomputed_tokens"] == 35
    assert rig.nothing_is_held()


@pytest.mark.parametrize(("restarts", "kind"), [(0, "unknown_outcome"), (1, "unknown_outcome"), (2, "raised")])
def test_without_restarts_left_or_for_another_failure_the_trajectory_fails(restarts, kind):
    limits = Limits(max_turns=50, max_context_tokens=10_000, trajectory_timeout_s=None, restarts=restarts)
    (result,) = Rig(environments=losing(2, kind), limits=limits).run([task("a", length=3)])
    assert (result.state, result.failure.kind, result.reward) == ("failed", kind, None)


def test_a_dead_replica_is_left_and_its_turn_is_served_elsewhere(tmp_path):
    dead, alive = (RuleReplica(f"replica-{i}", lambda _: say("ok")) for i in range(2))
    dead.dead = True
    rig = Rig(replicas=[dead, alive], log=tmp_path / "log.jsonl")
    results = rig.run([task(f"t{i}", length=2) for i in range(8)])
    assert {r.state for r in results} == {TrajectoryState.FINISHED}
    assert len(alive.requests) == 16
    assert events_of(tmp_path / "log.jsonl", "replica_lost")
    assert set(rig.router.in_flight()) == {"replica-1"}


def test_without_any_replica_left_trajectories_fail_with_a_sentence():
    dead = RuleReplica("replica-0", lambda _: say("ok"))
    dead.dead = True
    rig = Rig(replicas=[dead])
    results = rig.run([task("a"), task("b")])
    assert {(r.state, r.failure.kind) for r in results} == {("failed", "replica")}
    assert "no replica is left" in results[1].failure.message
    assert rig.nothing_is_held()


def test_a_replica_error_that_another_replica_cannot_help_fails_the_trajectory_only():
    def rule(request: Request) -> list[int]:
        if request.trajectory_id == "a#0":
            raise ReplicaFailure("prompt is longer than the model's context")
        return say("ok")

    rig = Rig(replicas=[RuleReplica("replica-0", rule)])
    a, b = rig.run([task("a"), task("b")])
    assert (a.failure.kind, b.state) == ("replica", "finished")
    assert set(rig.router.in_flight()) == {"replica-0"}


def test_stop_ends_the_batch_with_what_there_is():
    async def go():
        rig = Rig(environments=PlannedEnvironments(step_s=0.01), concurrency=2)
        engine = rig.build()
        running = asyncio.create_task(engine.run([task("quick"), *(task(f"t{i}", length=1000) for i in range(4))]))
        while engine.status().done < 1:  # noqa: ASYNC110  # the engine tells nobody but those who ask
            await asyncio.sleep(0.005)
        engine.stop()
        return rig, await running

    rig, results = asyncio.run(go())
    assert results[0].state == TrajectoryState.FINISHED
    assert [r.state for r in results[1:]] == [TrajectoryState.CANCELLED] * 4
    assert all(r.reward is None for r in results[1:])
    assert rig.nothing_is_held()


def test_cancelling_the_run_from_outside_cancels_it_and_frees_everything():
    async def go():
        rig = Rig(environments=PlannedEnvironments(step_s=0.01))
        running = asyncio.create_task(rig.build().run([task("a", length=1000)]))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return rig

    assert asyncio.run(go()).nothing_is_held()


def test_a_trajectory_over_its_deadline_fails_and_the_others_go_on():
    limits = Limits(max_turns=10_000, max_context_tokens=10**9, trajectory_timeout_s=0.1)
    rig = Rig(environments=PlannedEnvironments(step_s=0.01), limits=limits)
    endless, good = rig.run([task("endless", length=10_000), task("good")])
    assert (endless.state, endless.failure.kind) == ("failed", "deadline")
    assert "0.1 s" in endless.failure.message
    assert good.state == TrajectoryState.FINISHED
    assert rig.nothing_is_held()


@pytest.mark.parametrize(
    ("limits", "kind", "turns"),
    [
        (Limits(max_turns=2, max_context_tokens=10_000, trajectory_timeout_s=None), "turns", 2),
        # The first prompt has 35 ids, a turn adds 3 and 26: 35 + 3 + 26 = 64 leaves no room for a second turn, 65 does.
        (Limits(max_turns=50, max_context_tokens=65, trajectory_timeout_s=None), "context", 2),
        (Limits(max_turns=50, max_context_tokens=64, trajectory_timeout_s=None), "context", 1),
    ],
)
def test_limits_truncate_a_trajectory_and_keep_its_score(limits, kind, turns):
    (result,) = Rig(limits=limits).run([task("a", length=30)])
    assert (result.state, result.failure.kind, len(result.turns)) == ("truncated", kind, turns)
    assert result.reward == 0.0


def test_recomputed_tokens_are_those_uncached_that_were_computed_before(tmp_path):
    Rig(log=tmp_path / "log.jsonl").run([task("a", length=2)])
    first, second = events_of(tmp_path / "log.jsonl", "generate")
    assert (first.data["prompt_tokens"], first.data["recomputed_tokens"]) == (35, 0)
    # Nothing is cached: the 35 prompt ids and the 2 generated ones whose state was computed ("ok", not the end mark).
    assert (second.data["prompt_tokens"], second.data["recomputed_tokens"]) == (35 + 3 + 26, 37)


def test_scripted_tokens_count_as_computed_only_as_far_as_they_were_generated(tmp_path):
    replica = RuleReplica("replica-0", lambda request: [ord("h"), *[7] * (request.sampling.max_tokens - 1)])
    Rig(replicas=[replica], scripts={"a": ("hello", "bye")}, log=tmp_path / "log.jsonl").run([task("a", length=2)])
    second = events_of(tmp_path / "log.jsonl", "generate")[1]
    assert second.data["recomputed_tokens"] == 35 + 1


def test_progress_tells_the_environment_what_was_observed():
    rig = Rig()
    rig.run([task("a", length=2)])
    first, second = rig.environments.progress
    assert (first.turns, first.prompt_tokens, first.generated_tokens, first.group) == (0, 35, 3, "a")
    assert (second.turns, second.prompt_tokens, second.generated_tokens) == (1, 35 + 26, 6)


def test_a_trajectory_ends_in_exactly_one_state():
    trajectory = Trajectory("a#0", task("a"), "a")
    with pytest.raises(TransitionError, match="pending to acting"):
        trajectory.enter(TrajectoryState.ACTING)
    trajectory.end(TrajectoryState.FAILED)
    for state in TrajectoryState:
        with pytest.raises(TransitionError):
            trajectory.enter(state)


def test_an_unforeseen_error_costs_its_trajectory_aloud_and_not_the_batch(tmp_path, caplog):
    def rule(request: Request) -> list[int]:
        if request.trajectory_id == "odd#0":
            raise KeyError("nobody foresaw this")
        return say("ok")

    rig = Rig(replicas=[RuleReplica("replica-0", rule)], log=tmp_path / "log.jsonl")
    odd, good = rig.run([task("odd", length=2), task("good", length=2)])
    assert (odd.state, odd.failure.kind, odd.reward) == ("failed", "internal", None)
    assert "KeyError: 'nobody foresaw this'" in odd.failure.message
    assert good.state == TrajectoryState.FINISHED
    assert "Traceback" in caplog.text  # whoever reads the log can mend it
    assert rig.nothing_is_held()


def test_an_action_that_fails_is_in_the_log_with_its_slot_class(tmp_path):
    def on_step(trajectory_id: str, step: int) -> None:
        raise EnvironmentFailure("timeout", "no answer")

    rig = Rig(environments=PlannedEnvironments(on_step=on_step), log=tmp_path / "log.jsonl")
    rig.run([task("a", length=2), task("no", refuse=True)])
    (action,) = events_of(tmp_path / "log.jsonl", "act")
    assert (action.data["outcome"], action.data["slot_class"]) == ("timeout", "planned.step")
    assert action.data["service_s"] is None  # not known here, and not 0
    resets = {e.trajectory_id: e.data["outcome"] for e in events_of(tmp_path / "log.jsonl", "reset")}
    assert resets == {"a#0": "ok", "no#0": "refused"}


def test_stopped_before_its_first_step_a_trajectory_still_ends_as_cancelled(tmp_path):
    ended = []

    async def go():
        rig = Rig(log=tmp_path / "log.jsonl")
        engine = rig.build()
        running = asyncio.create_task(engine.run([task("a"), task("b")], on_end=ended.append))
        await asyncio.sleep(0)
        engine.stop()
        results = await running
        rig.events.close()
        return results

    assert [result.state for result in asyncio.run(go())] == [TrajectoryState.CANCELLED] * 2
    assert len(ended) == 2
    assert len(events_of(tmp_path / "log.jsonl", "ended")) == 2


def test_a_script_as_long_as_the_turn_limit_is_cut_by_the_limit():
    limits = Limits(max_turns=2, max_context_tokens=10_000, trajectory_timeout_s=None)
    (result,) = Rig(limits=limits, scripts={"a": ("x", "y")}).run([task("a", length=5)])
    assert (result.state, result.failure.kind) == ("truncated", "turns")
