"""The reward: the benchmark's state check and response check of a multi-turn task, 1.0 or 0.0.

The ground truth is executed beside the session, on instances of its own, one user turn at a time. A user turn whose
ground truth is empty (the user asked for something that cannot be done yet) is not checked. After every other one

1. the agent must have made at least one call in that turn;
2. *state check*: every public attribute of every API instance must equal that of the ground truth's instance;
3. *response check*: every result of this turn's ground truth must be among the results the agent has got so far, in
   this turn or an earlier one, counting repeated ones. Order and additional calls do not matter.

The first user turn that fails decides; a task is solved when none does. The benchmark's published checker
(`bfcl_eval.eval_checker.multi_turn_eval`) is the reference for this module and the oracle in its tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from makespan.envs.bfcl.apis import ApiSession
from makespan.envs.bfcl.calls import Call, Malformed, parse_action
from makespan.envs.bfcl.data import Scenario
from makespan.rollout.errors import FormatError

_SHOWN_CHARS = 200
"""How much of a missing response a verdict quotes."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether the task is solved; otherwise the user turn that decided (from 0), the check that failed, and on what."""

    valid: bool
    user_turn: int | None = None
    check: Literal["no_call", "state", "response", "truncated"] | None = None
    detail: str = ""

    @property
    def reward(self) -> float:
        return 1.0 if self.valid else 0.0


SOLVED = Verdict(valid=True)


class RewardCheck:
    """Follows one session and judges each user turn as it ends.

    Responses are kept as digests, so that the memory of a check does not grow with what the APIs answered.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._ground_truth = [[parse_call(text) for text in turn] for turn in scenario.ground_truth]
        self._truth = ApiSession(scenario)
        self._responses: Counter[bytes] = Counter()
        self._called = False
        self._user_turn = 0
        self._verdict = SOLVED

    def record(self, response: str) -> None:
        """Take note of what one of the agent's calls in the present user turn answered."""
        self._responses[_digest(response)] += 1
        self._called = True

    def end_turn(self, session: ApiSession) -> Verdict:
        """Judge the present user turn and go to the next. Returns the verdict so far, which a failure makes final."""
        if self._verdict.valid:
            self._verdict = self._judge(session, self._ground_truth[self._user_turn])
        self._user_turn += 1
        self._called = False
        return self._verdict

    def truncate(self, detail: str) -> Verdict:
        """The verdict of a session that was cut short: not solved."""
        if self._verdict.valid:
            self._verdict = Verdict(valid=False, user_turn=self._user_turn, check="truncated", detail=detail)
        return self._verdict

    def _judge(self, session: ApiSession, calls: Sequence[Call]) -> Verdict:
        if not calls:
            return SOLVED
        expected = [self._truth.execute(call) for call in calls]
        turn = self._user_turn
        if not self._called:
            return Verdict(valid=False, user_turn=turn, check="no_call", detail="no call was made")
        different = ", ".join(state_differences(session, self._truth))
        if different:
            return Verdict(valid=False, user_turn=turn, check="state", detail=f"different: {different}")
        missing = _first_missing(expected, self._responses)
        if missing is not None:
            return Verdict(valid=False, user_turn=turn, check="response", detail=f"missing: {missing[:_SHOWN_CHARS]}")
        return SOLVED


def judge(scenario: Scenario, turns: Sequence[Sequence[Sequence[str]]]) -> Verdict:
    """The verdict on a finished attempt: for each user turn its steps, for each step the source text of its calls."""
    session, check, verdict = ApiSession(scenario), RewardCheck(scenario), SOLVED
    for steps in turns:
        for text in (text for step in steps for text in step):
            check.record(session.execute(parse_call(text)))
        verdict = check.end_turn(session)
    if len(turns) < len(scenario.ground_truth):
        return check.truncate(f"ended after {len(turns)} of {len(scenario.ground_truth)} user turns")
    return verdict


def parse_call(text: str) -> Call:
    """The one call that a line of ground truth is."""
    parsed = parse_action(text)
    if isinstance(parsed, Malformed) or len(parsed) != 1:
        raise FormatError(f"not one call with literal arguments: {text[:_SHOWN_CHARS]!r}")
    return parsed[0]


def state_differences(session: ApiSession, truth: ApiSession) -> list[str]:
    """Names (`Class.attribute`) of the public attributes that are not as the ground truth's instances have them."""
    return [
        f"{class_name}.{attribute}"
        for class_name, expected in truth.instances.items()
        for attribute, value in vars(expected).items()
        if not attribute.startswith("_") and _differs(session.instances[class_name], attribute, value)
    ]


def _differs(instance: Any, attribute: str, expected: Any) -> bool:
    try:
        return bool(getattr(instance, attribute) != expected)
    except (AttributeError, RecursionError):  # never set, or a directory that contains itself
        return True


def _first_missing(expected: Iterable[str], responses: Counter[bytes]) -> str | None:
    left = responses.copy()
    for response in expected:
        digest = _digest(response)
        if left[digest] == 0:
            return response
        left[digest] -= 1
    return None


def _digest(response: str) -> bytes:
    return blake2b(response.encode("utf-8", "surrogatepass"), digest_size=16).digest()
