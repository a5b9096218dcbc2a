"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard as an environment.

A simulated user asks for one thing after another. Within a *user turn* the agent may act several times: an action that
calls functions is answered with one `tool` message a call, an action without a call ends the user turn and brings the
next user message (`calls.py` says what counts as a call). After the last user turn the reward is 1.0 if the APIs ended
in the ground truth's state in every user turn and its results were obtained (`reward.py`), else 0.0.

A call that cannot be read, names no function, has wrong arguments or fails is an observation that says so, and costs a
step. The agent has `STEPS_PER_TURN` steps in a user turn; needing more truncates the session with reward 0.0.

What differs from the benchmark's own harness, apart from the wording of the prompt:

* an unreadable call is answered instead of ending the user turn, and positional arguments count;
* only the scenario's functions can be called (the harness evaluates the text, so Python's built-ins answer too), and
  text arguments stay as they are (the harness rewrites function names inside them);
* sessions share nothing, and computations without bound are refused (`apis.py` and `limits.py` say which).

As in the benchmark, functions that are held out, or that the prompt does not document, do run when they are called.
"""

from __future__ import annotations

import msgspec

from makespan.envs.bfcl.apis import ApiSession
from makespan.envs.bfcl.calls import Call, Malformed, parse_action
from makespan.envs.bfcl.data import Scenario, scenario
from makespan.envs.bfcl.prompt import system_message, turn_messages
from makespan.envs.bfcl.reward import RewardCheck, Verdict
from makespan.rollout.environment import Action, Message, Observation, StepResult
from makespan.rollout.errors import MakespanError
from makespan.rollout.trajectory import Task

STEPS_PER_TURN = 20
"""The benchmark's own limit on answers with calls within one user turn."""

MAX_OBSERVATION_CHARS = 200_000
"""Results of one action that are shown to the agent; all results of the longest ground truth together are 70,454."""


class _Session(msgspec.Struct):
    """A task in progress."""

    scenario: Scenario
    apis: ApiSession
    check: RewardCheck
    user_turn: int = 0
    steps: int = 0
    """Taken in the present user turn."""


class BfclEnvironment:
    """One session at a time of a BFCL multi-turn task; a `SyncEnvironment`.

    Sessions of different environments are independent, in the same thread or in different ones.
    """

    def __init__(self) -> None:
        self._session: _Session | None = None

    def reset(self, task: Task) -> Observation:
        """Start the task that `task.task_id` names. Raises `TaskRefused` if there is none or BFCL is not installed."""
        chosen = scenario(task)
        self._session = _Session(chosen, ApiSession(chosen), RewardCheck(chosen))
        return Observation(
            messages=(system_message(chosen), *turn_messages(chosen, 0)),
            info={"user_turns": len(chosen.user_turns)},
        )

    def step(self, action: Action) -> StepResult:
        """Execute the calls of an action, or end the user turn if it has none."""
        session = self._session
        if session is None:
            raise MakespanError("step() without a task in progress: call reset(task) first")
        parsed = parse_action(action.text)
        if isinstance(parsed, tuple) and not parsed:
            return self._end_turn(session)
        session.steps += 1
        if session.steps > STEPS_PER_TURN:
            return self._end(session.check.truncate(f"more than {STEPS_PER_TURN} steps in a user turn"), truncated=True)
        if isinstance(parsed, Malformed):
            message = _tool_message(f"Malformed call: {parsed.reason}. Nothing was executed.")
            return _go_on(session, (message,), malformed=True)
        return _go_on(session, _execute(session, parsed))

    def close(self) -> None:
        self._session = None

    def _end_turn(self, session: _Session) -> StepResult:
        verdict = session.check.end_turn(session.apis)
        session.user_turn += 1
        session.steps = 0
        if session.user_turn == len(session.scenario.user_turns):
            return self._end(verdict)
        return _go_on(session, turn_messages(session.scenario, session.user_turn))

    def _end(self, verdict: Verdict, *, truncated: bool = False) -> StepResult:
        self._session = None
        return StepResult(
            observation=Observation(messages=()),
            reward=verdict.reward,
            terminated=not truncated,
            truncated=truncated,
            info={"verdict": msgspec.to_builtins(verdict)},
        )


def _execute(session: _Session, calls: tuple[Call, ...]) -> tuple[Message, ...]:
    """Run calls in order; what they answered is noted in full for the reward and shown up to a limit."""
    messages = []
    room = MAX_OBSERVATION_CHARS
    for call in calls:
        response = session.apis.execute(call)
        session.check.record(response)
        shown = response[:room]
        room -= len(shown)
        left_out = len(response) - len(shown)
        messages.append(_tool_message(f"{shown} … ({left_out:,} characters more)" if left_out else shown))
    return tuple(messages)


def _tool_message(text: str) -> Message:
    """A `tool` message; a lone surrogate, which an escape in an argument can make, is escaped again."""
    return Message(role="tool", content=text.encode("utf-8", "backslashreplace").decode())


def _go_on(session: _Session, messages: tuple[Message, ...], *, malformed: bool = False) -> StepResult:
    info = {"user_turn": session.user_turn, "malformed": malformed}
    return StepResult(observation=Observation(messages=messages), info=info)
