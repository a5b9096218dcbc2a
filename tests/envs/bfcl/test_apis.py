from __future__ import annotations

import decimal
import random
from typing import Any

import pytest

from makespan.envs.bfcl.apis import ApiSession
from makespan.envs.bfcl.calls import Call
from makespan.envs.bfcl.data import CATEGORIES, Scenario, scenario, tasks
from makespan.envs.bfcl.reward import parse_call

from .conftest import Executor
from .mutations import add_wrong_call, change_argument, repeat_call

TWITTER = {"authenticated": True, "username": "me", "tweets": {}}


def one_api(name: str, config: dict[str, Any], category: str = "multi_turn_base") -> Scenario:
    return Scenario(
        task_id=f"{category}_0",
        category=category,
        classes=(name,),
        initial_config={name: config},
        user_turns=(),
        held_out={},
        ground_truth=(),
    )


@pytest.mark.parametrize("category", CATEGORIES)
def test_calls_are_answered_in_the_words_of_the_benchmarks_executor(category: str, executor: Executor) -> None:
    errors = 0
    for task in tasks(category):
        chosen = scenario(task)
        rng = random.Random(task.task_id)
        turns = [list(turn) for turn in chosen.ground_truth]
        for mutate in (change_argument, add_wrong_call, repeat_call):
            mutate(turns, list(chosen.classes), rng)
        texts = [text for turn in turns for text in turn]
        session = ApiSession(chosen)
        answers = [session.execute(parse_call(text)) for text in texts]
        assert answers == executor(chosen, texts)
        errors += sum(answer.startswith("Error during execution: ") for answer in answers)
    assert errors >= 100


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Call("no_such"), "Error during execution: name 'no_such' is not defined"),
        (Call("_load_scenario", ({},)), "Error during execution: name '_load_scenario' is not defined"),
        (Call("__class__"), "Error during execution: name '__class__' is not defined"),
        (Call("tweets"), "Error during execution: name 'tweets' is not defined"),
        (
            Call("retweet"),
            "Error during execution: TwitterAPI.retweet() missing 1 required positional argument: 'tweet_id'",
        ),
        (
            Call("retweet", (1, 2)),
            "Error during execution: TwitterAPI.retweet() takes 2 positional arguments but 3 were given",
        ),
        (
            Call("retweet", (), {"id": 1}),
            "Error during execution: TwitterAPI.retweet() got an unexpected keyword argument 'id'",
        ),
        (Call("retweet", (7,)), '{"error": "Tweet with ID 7 not found."}'),
        (Call("retweet", ([],)), "Error during execution: unhashable type: 'list'"),
        (Call("get_user_tweets", ("me",)), "[]"),
    ],
)
def test_a_call_that_cannot_run_says_why(call: Call, answer: str) -> None:
    assert ApiSession(one_api("TwitterAPI", TWITTER)).execute(call) == answer


def test_what_one_session_appends_to_a_default_argument_no_other_sees() -> None:
    posted = '{"id": 0, "username": "me", "content": "hi", "tags": [], "mentions": []}'
    for _ in range(2):
        session = ApiSession(one_api("TwitterAPI", TWITTER))
        assert session.execute(Call("post_tweet", ("hi",))) == posted
        session.execute(Call("mention", (0, ["@you"])))
        assert session.execute(Call("get_tweet", (0,))) == posted.replace('"mentions": []', '"mentions": ["@you"]')


def test_what_one_session_pays_with_a_card_of_the_long_context_no_other_sees() -> None:
    config = {"access_token": "t", "token_expires_in": 2}
    flight = ("2024-11-15", "SFO", "LAX", "first")
    balances = []
    for _ in range(2):
        session = ApiSession(one_api("TravelAPI", config, "multi_turn_long_context"))
        cards: dict[str, dict[str, Any]] = session.instances["TravelAPI"].credit_card_list
        card = next(name for name, details in cards.items() if details.get("balance", 0) > 2_000)
        balances.append(cards[card]["balance"])
        assert '"booking_status": true' in session.execute(Call("book_flight", ("t", card, *flight)))
        assert cards[card]["balance"] < balances[-1]
    assert balances[0] == balances[1]


def test_the_initial_state_of_a_task_is_never_changed() -> None:
    chosen = one_api("TwitterAPI", TWITTER | {"following_list": ["a"]})
    session = ApiSession(chosen)
    assert session.execute(Call("follow_user", ("b",))) == '{"follow_status": true}'
    assert chosen.initial_config["TwitterAPI"]["following_list"] == ["a"]


def test_precision_is_as_before_after_a_call() -> None:
    session = ApiSession(one_api("MathAPI", {}))
    import mpmath

    before = (mpmath.mp.dps, decimal.getcontext().prec)
    assert session.execute(Call("logarithm", (10, 2, 7))).startswith("{'result': mpf('3.321928")
    assert session.execute(Call("square_root", (10, 7))) == "{'result': Decimal('3.162278')}"
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before
