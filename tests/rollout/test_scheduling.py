import pytest

from makespan.rollout.coordinator import Coordinator
from makespan.rollout.errors import ConfigError
from makespan.rollout.scheduling import action_policy
from makespan.rollout.trajectory import Progress


def order(name, turns, **knows):
    """Trajectory ids in the order in which the gate would serve them."""
    key = action_policy(name, Coordinator(), **knows).key
    return sorted(turns, key=lambda trajectory_id: key(trajectory_id, Progress(turns=turns[trajectory_id])))


def test_first_come_first_served_leaves_the_order_of_arrival():
    assert order("fifo", {"a": 3, "b": 9, "c": 1}) == ["a", "b", "c"]


def test_progress_serves_the_most_progressed_and_least_progress_the_least():
    assert order("progress", {"a": 3, "b": 9, "c": 1}) == ["b", "a", "c"]
    assert order("least-progress", {"a": 3, "b": 9, "c": 1}) == ["c", "a", "b"]


def test_the_oracle_serves_what_takes_longest_from_its_present_turn_on():
    remaining = {("a", 3): 10.0, ("b", 9): 50.0, ("c", 1): 20.0}
    knows = {"remaining_s": lambda trajectory_id, turn: remaining[trajectory_id, turn]}
    assert order("oracle", {"a": 3, "b": 9, "c": 1}, **knows) == ["b", "c", "a"]


def test_the_oracle_needs_a_trace():
    with pytest.raises(ConfigError, match="trace"):
        action_policy("oracle", Coordinator())


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'least-progress'"):
        action_policy("leastprogress", Coordinator())
