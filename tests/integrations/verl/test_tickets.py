"""Every turn that is granted is given back exactly once, however it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from makespan.integrations.verl.tickets import Ticket, TicketLedger
from makespan.rollout.route import Served


def _ticket(request_id: str, *, trajectory: str = "", worker: str = "", granted_s: float = 0.0) -> Ticket:
    return Ticket(request_id=request_id, trajectory_id=trajectory, replica_id="r0", worker=worker, granted_s=granted_s)


def _ledger(ttl_s: float = 100.0) -> tuple[TicketLedger, list[str]]:
    given_back: list[str] = []
    return TicketLedger(ttl_s=ttl_s, close=lambda ticket, _: given_back.append(ticket.replica_id)), given_back


def test_a_release_closes_its_ticket_and_a_second_one_changes_nothing() -> None:
    ledger, given_back = _ledger()
    ledger.grant(_ticket("t|0", trajectory="t"))
    ledger.release("t|0")
    ledger.release("t|0")
    assert given_back == ["r0"]
    assert (ledger.counters().open, ledger.counters().released, ledger.counters().late_releases) == (0, 1, 1)


def test_the_next_turn_of_a_trajectory_closes_a_turn_that_was_never_released() -> None:
    ledger, given_back = _ledger()
    ledger.grant(_ticket("t|0", trajectory="t"))
    ledger.grant(_ticket("t|1", trajectory="t"))
    assert given_back == ["r0"]
    assert (ledger.counters().open, ledger.counters().superseded) == (1, 1)


def test_a_grant_that_arrives_after_its_trajectory_ended_is_given_back_at_once() -> None:
    ledger, given_back = _ledger()
    ledger.end("t")
    assert not ledger.grant(_ticket("t|0", trajectory="t"))
    assert ledger.grant(_ticket("u|0", trajectory="u"))
    ledger.release("u|0")
    given_back.pop()
    assert given_back == ["r0"]
    assert ledger.counters().open == 0


def test_what_became_of_a_turn_goes_with_its_release_and_with_nothing_else() -> None:
    closed: list[tuple[str, Served | None]] = []
    ledger = TicketLedger(ttl_s=100.0, close=lambda ticket, served: closed.append((ticket.trajectory_id, served)))
    served = Served(context_tokens=120, cached_tokens=80, seconds=1.5)
    ledger.grant(_ticket("a|0", trajectory="a"))
    ledger.grant(_ticket("b|0", trajectory="b"))
    ledger.release("a|0", served)
    ledger.end("b")
    assert closed == [("a", served), ("b", None)]


def test_turns_without_a_trajectory_may_share_a_request_id_and_are_not_superseded() -> None:
    ledger, given_back = _ledger()
    ledger.grant(_ticket("same"))
    ledger.grant(_ticket("same"))
    assert ledger.counters().open == 2
    ledger.release("same")
    assert (ledger.counters().open, len(given_back)) == (1, 1)


def test_only_the_tickets_of_dead_workers_are_closed() -> None:
    ledger, _ = _ledger()
    ledger.grant(_ticket("a|0", trajectory="a", worker="dead"))
    ledger.grant(_ticket("b|0", trajectory="b", worker="alive"))
    ledger.grant(_ticket("c|0", trajectory="c"))
    assert ledger.workers() == {"dead", "alive"}
    ledger.lose_workers(["dead"])
    assert (ledger.counters().open, ledger.counters().worker_lost) == (2, 1)


def test_a_ticket_expires_after_its_time_to_live_and_not_before() -> None:
    ledger, given_back = _ledger(ttl_s=10.0)
    ledger.grant(_ticket("a|0", trajectory="a", granted_s=0.0))
    ledger.grant(_ticket("b|0", trajectory="b", granted_s=5.0))
    ledger.expire(10.0)
    assert given_back == []
    ledger.expire(10.5)
    assert (given_back, ledger.counters().open, ledger.counters().expired) == (["r0"], 1, 1)


def test_tickets_of_a_removed_replica_do_not_count_when_it_comes_back() -> None:
    ledger, given_back = _ledger()
    ledger.grant(_ticket("a|0", trajectory="a"))
    ledger.lose_replicas(["r0"])
    ledger.release("a|0")
    assert given_back == ["r0"]
    assert ledger.counters().late_releases == 1


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["grant", "release", "end", "lose", "expire"]), st.integers(0, 3), st.integers(0, 3)),
    max_size=60,
)


@given(_EVENTS)
def test_whatever_happens_a_replica_gets_back_each_grant_at_most_once_and_all_after_the_time_to_live(
    events: list[tuple[str, int, int]],
) -> None:
    ledger, given_back = _ledger(ttl_s=10.0)
    granted = 0
    for now, (what, trajectory, turn) in enumerate(events):
        name, request = f"t{trajectory}", f"t{trajectory}|{turn}"
        if what == "grant":
            ledger.grant(_ticket(request, trajectory=name, worker=f"w{trajectory}", granted_s=float(now)))
            granted += 1
        elif what == "release":
            ledger.release(request)
        elif what == "end":
            ledger.end(name)
        elif what == "lose":
            ledger.lose_workers([f"w{trajectory}"])
        else:
            ledger.expire(float(now))
        assert ledger.counters().open == granted - len(given_back) >= 0
    ledger.expire(len(events) + 100.0)
    assert (ledger.counters().open, len(given_back)) == (0, granted)
