"""The text that Prometheus reads, read back by its own client library."""

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.exposition import Family, metrics_endpoint, render

FAMILIES = [
    Family("makespan_engine_generated_tokens_total", "counter", "Tokens.", [({"replica": "r"}, 12_345_678)]),
    Family("makespan_env_slots", "gauge", "Slots.", [({"slot_class": 'odd "class"\\\n'}, 5)]),
    Family("makespan_engine_action_seconds", "summary", "Actions.", [({"c": "x"}, 0.1)], [({"c": "x"}, 3)]),
    Family("makespan_engine_failures_total", "counter", "None yet.", []),
]


def test_prometheus_reads_what_is_rendered():
    found = {family.name: family for family in text_string_to_metric_families(render(FAMILIES))}
    assert set(found) == {
        "makespan_engine_generated_tokens",
        "makespan_env_slots",
        "makespan_engine_action_seconds",
    }
    tokens = found["makespan_engine_generated_tokens"]
    assert tokens.type == "counter"
    assert [(s.name, s.labels, s.value) for s in tokens.samples] == [
        ("makespan_engine_generated_tokens_total", {"replica": "r"}, 12_345_678.0)  # every digit
    ]
    assert found["makespan_env_slots"].samples[0].labels == {"slot_class": 'odd "class"\\\n'}
    summary = found["makespan_engine_action_seconds"]
    assert {(s.name.removeprefix("makespan_engine_action_seconds"), s.value) for s in summary.samples} == {
        ("_sum", 0.1),
        ("_count", 3.0),
    }


def test_the_endpoint_serves_metrics_and_nothing_else():
    def get(url):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, "", ""

    async def main():
        async with metrics_endpoint("127.0.0.1", 0, lambda: "makespan_up 1\n") as url:
            found = await asyncio.to_thread(get, url), await asyncio.to_thread(get, url.replace("metrics", "other"))
            port = int(url.rpartition(":")[2].partition("/")[0])
            with pytest.raises(ConfigError, match="cannot listen"):
                async with metrics_endpoint("127.0.0.1", port, str):
                    pass
        return found

    good, other = asyncio.run(main())
    assert good == (200, "text/plain; version=0.0.4; charset=utf-8", "makespan_up 1\n")
    assert other[0] == 404
