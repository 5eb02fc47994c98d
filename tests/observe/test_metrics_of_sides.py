"""Metrics of a prefill and a decode server: their queues, their transfers, and which engine it is."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from scrapes import families

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equivalence"))
from pair_engines import engine_pair

from sgviz.events.schema import DisaggPreallocated, DisaggTransferred, Event
from sgviz.observe import names
from sgviz.observe.metrics import Metrics
from sgviz.recording import Recording


def value(found: dict[str, Metric], name: str, ending: str = "") -> float:
    """Sum over the series of that name; 0 where nothing was observed."""
    return sum(each.value for each in found[name].samples if each.name == f"sglang:{name}{ending}")


def told(metrics: Metrics) -> dict[str, Metric]:
    parsed = text_string_to_metric_families(metrics.text().decode())
    return {family.name.removeprefix("sglang:"): family for family in parsed}


def test_both_sides_of_a_real_pair() -> None:
    draw = random.Random(7)
    asked = [[draw.randint(5, 200) for _ in range(draw.randint(5, 120))] for _ in range(24)]
    with engine_pair("tiny-llama", device="mock", mock_step_ms=2.0, max_total_tokens=1024) as pair:
        pair.generate(asked, {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True})
        sides = {"prefill": pair.prefill, "decode": pair.decode}
        for side, engine in sides.items():
            found, rec = families(engine.serve(port=0).url), engine.recording().freeze()
            labels = {sample.labels["engine_type"] for sample in found["num_running_reqs"].samples}
            assert labels == {side} == {s.labels["engine_type"] for s in found["num_requests"].samples}
            check_transfers(found, rec)
            check_queues(rec, side)


def check_transfers(found: dict[str, Metric], rec: Recording) -> None:
    ends = [event.body for event in rec.stamped() if isinstance(event.body, DisaggTransferred)]
    went = [body for body in ends if body.ok and 0 < body.start_ns < body.end_ns]
    assert len(went) == 24
    for name, per in (("kv_transfer_latency_ms", 1e6), ("kv_transfer_total_mb", 1e6)):
        assert value(found, name, "_count") == len(went)
        whole = sum(body.bytes if name.endswith("mb") else body.end_ns - body.start_ns for body in went)
        assert value(found, name, "_sum") == pytest.approx(whole / per)
    speed = sum(body.bytes / (body.end_ns - body.start_ns) for body in went)
    assert value(found, "kv_transfer_speed_gb_s", "_sum") == pytest.approx(speed)
    assert value(found, "kv_transfer_bootstrap_ms", "_count") == 24
    rooms = [event for event in rec.stamped() if isinstance(event.body, DisaggPreallocated)]
    assert value(found, "kv_transfer_alloc_ms", "_count") == len(rooms) in (0, 24)
    for name in names.SIDE_COUNTERS:
        assert value(found, name, "_total") == 0


def check_queues(rec: Recording, side: str) -> None:
    """At any moment the gauges are the queues of the fold."""
    metrics, met = Metrics("m", side=side), set[str]()
    events = list(rec.stamped())
    for start in range(0, len(events), 37):
        metrics.fold(events[start : start + 37])
        found = told(metrics)
        apart = list(rec.at(count=min(start + 37, len(events))).apart.values())
        waits = apart.count("bootstrap") + apart.count("prealloc")
        expected = dict.fromkeys(names.SIDE_GAUGES, 0)
        if side == "prefill":
            expected["num_prefill_bootstrap_queue_reqs"] = waits
            expected["num_prefill_inflight_queue_reqs"] = apart.count("inflight")
        else:
            expected["num_decode_prealloc_queue_reqs"] = waits
            expected["num_decode_transfer_queue_reqs"] = apart.count("transfer")
        assert {name: value(found, name) for name in expected} == expected
        met |= {name for name, count in expected.items() if count}
    assert len(met) == 2


@pytest.mark.parametrize(("place", "counted"), [("bootstrap", "bootstrap"), ("transfer", "transfer")])
def test_a_failure_is_counted_by_what_it_ended(place: str, counted: str) -> None:
    metrics = Metrics("m", side="decode")
    metrics._ranks[0].engine.apart["a"] = place
    failed = DisaggTransferred(
        rid="a",
        side="decode",
        room=1,
        ok=False,
        why="x",
        bytes=0,
        pieces=0,
        start_ns=0,
        end_ns=0,
        backend="shm",
    )
    metrics.fold([Event(1, 10, "scheduler", 0, failed)])
    found = told(metrics)
    for name in ("bootstrap", "transfer"):
        assert value(found, f"num_{name}_failed_reqs", "_total") == (name == counted)


def test_a_server_of_both_sides_has_none_of_them() -> None:
    found = told(Metrics("m"))
    assert not set(found) & {*names.SIDE_GAUGES, *names.SIDE_COUNTERS, *names.SIDE_HISTOGRAMS}
