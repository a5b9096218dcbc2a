from makespan.rollout.telemetry.slowest import slowest
from makespan.rollout.telemetry.timeline import Phase, Row, Segment


def row(name, *spent, state="finished", failure="", turns=3):
    """A row that spends `(phase, seconds)` one after the other."""
    segments, at = [], 0.0
    for phase, seconds in spent:
        segments.append(Segment(at, at + seconds, phase, 0, ""))
        at += seconds
    return Row(
        trajectory_id=name,
        group="g",
        state=state,
        end_s=at,
        turns=turns,
        generated_tokens=None,
        context_tokens=None,
        reward=None,
        failure=failure,
        recomputed_tokens=None,
        cached_tokens=None,
        replicas=1,
        segments=tuple(segments),
    )


DECODE, ENVIRONMENT, SLOT_QUEUE = Phase.DECODE, Phase.ENVIRONMENT, Phase.SLOT_QUEUE


def test_the_reason_is_what_a_trajectory_has_beyond_the_median_not_what_it_does_most():
    found = slowest(
        [
            row("a", (DECODE, 60.0), (ENVIRONMENT, 1.0)),
            row("b", (DECODE, 61.0), (ENVIRONMENT, 30.0), turns=9),
            row("c", (DECODE, 60.0), (ENVIRONMENT, 2.0)),
        ],
        2,
    )
    assert [slow.row.trajectory_id for slow in found] == ["b", "c"]
    assert found[0].reason == "environment 30.0 s, 28.0 s beyond the median; 9 turns (median 3)"
    assert found[1].reason == "decode 60.0 s, no phase beyond the median; 3 turns (median 3)"


def test_a_failure_is_part_of_the_reason_and_cancelled_ones_are_left_out():
    found = slowest(
        [
            row("a", (SLOT_QUEUE, 5.0), state="failed", failure="timeout"),
            row("b", (SLOT_QUEUE, 1.0)),
            row("c", (SLOT_QUEUE, 1.0)),
            row("d", (SLOT_QUEUE, 90.0), state="cancelled"),
        ],
        1,
    )
    assert found[0].row.trajectory_id == "a"
    assert found[0].reason.startswith("failed (timeout): slot queue 5.0 s, 4.0 s beyond the median")


def test_an_empty_batch_has_none():
    assert slowest([], 5) == []
