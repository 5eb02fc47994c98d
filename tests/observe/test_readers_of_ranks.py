"""What is read while several schedulers run: metrics by rank, the state and the views of each, from one server."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from scrapes import families

import sgviz
from sgviz.engine import Engine
from sgviz.events.schema import AdmitOk, DpChose, DpRankChanged, Event, RequestFinished, RequestRetracted
from sgviz.observe.metrics import Metrics
from sgviz.observe.names import GAUGES
from sgviz.recording import Moment, Recording
from sgviz.recording.rank_split import rank_of

RANKS = ("0", "1")
POOL = 384
SMALL = {"max_total_tokens": POOL, "chunked_prefill_size": 64, "schedule_conservativeness": 0.001}
PROMPTS = [("You are a patient teacher. " * (n % 3)) + f"{n}: why?" for n in range(40)]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    """Two schedulers that have retracted, evicted and shared prefixes."""
    with Engine("tiny-llama", device="mock", mock_step_ms=1, dp_size=2, **SMALL) as engine:
        url = engine.serve(port=0).url
        engine.generate(PROMPTS, {"max_new_tokens": 40, "temperature": 0})
        engine.generate("x", {"n": 4, "max_new_tokens": 3})
        engine.generate("y", {"max_new_tokens": 3}, routed_dp_rank=1)
        yield engine, url


def samples(found: dict[str, Metric], name: str) -> list[Sample]:
    """Those of a counter, gauge or histogram that are its value or count."""
    family = found[name]
    return [each for each in family.samples if not each.name.endswith(("_bucket", "_sum", "_created"))]


def by_rank(found: dict[str, Metric], name: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for sample in samples(found, name):
        rank = sample.labels["dp_rank"]
        out[rank] = out.get(rank, 0.0) + sample.value
    return out


# ------------------------------------------------------------ /metrics


def test_requests_are_counted_together_and_schedulers_apart(served: tuple[Engine, str]) -> None:
    engine, url = served
    found, rec = families(url), engine.recording().freeze()
    done = [event.body for event in rec.stamped() if isinstance(event.body, RequestFinished)]
    (requests,) = [sum(each.value for each in samples(found, "num_requests"))]
    assert requests == len(done) > len(PROMPTS)
    waited = by_rank(found, "queue_time_seconds")
    assert set(waited) == set(RANKS)
    assert sum(waited.values()) == len(done)  # each was in the queue of one of the two
    chosen = [event.body for event in rec.stamped() if isinstance(event.body, DpChose)]
    assert len(chosen) > len(PROMPTS)
    for rank in RANKS:
        part = rec.rank(int(rank))
        mine = {body.rid for body in chosen if body.rank == int(rank)} & {body.rid for body in done}
        assert waited[rank] == len(mine)
        batches = part.iterations
        assert by_rank(found, "cuda_graph_passes")[rank] == len(batches)
        device = by_rank(found, "forward_execution_seconds")[rank]
        assert device == pytest.approx(batches.device_ms.sum() / 1e3, rel=1e-6)
        lines = [event.body for event in part.stamped()]
        computed = sum(body.extend for body in lines if isinstance(body, AdmitOk))
        (told,) = [
            sample.value
            for sample in samples(found, "realtime_tokens")
            if (sample.labels["dp_rank"], sample.labels["mode"]) == (rank, "prefill_compute")
        ]
        assert told == computed > 0
        retracted = sum(isinstance(body, RequestRetracted) for body in lines)
        assert by_rank(found, "num_retracted_requests")[rank] == retracted > 0


def test_gauges_of_a_rank_are_the_state_of_its_scheduler(served: tuple[Engine, str]) -> None:
    engine, url = served
    found, rec = families(url), engine.recording().freeze()
    for rank in RANKS:
        moment = rec.rank(int(rank)).at()
        told = {name: by_rank(found, name)[rank] for name in GAUGES}
        assert told["kv_available_tokens"] == moment.free
        assert told["kv_evictable_tokens"] == moment.evictable > 0
        assert told["max_total_num_tokens"] == moment.total == POOL
        assert told["new_token_ratio"] == moment.new_token_ratio
        assert told["num_running_reqs"] == told["num_queue_reqs"] == told["num_retracted_reqs"] == 0
        assert told["gen_throughput"] > 0 and told["fwd_occupancy"] > 0


def test_one_label_more_on_what_a_scheduler_has_and_nowhere_else(served: tuple[Engine, str]) -> None:
    found = families(served[1])
    scheduler = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    for name, family in found.items():
        for sample in family.samples:
            labels = set(sample.labels)
            ours = name == "trace_dropped_events" or name.startswith("trace_dropped_events")
            assert ("dp_rank" in labels) == (scheduler <= labels and not ours), (name, labels)
    for name in ("num_running_reqs", "num_retracted_requests", "evicted_tokens"):
        assert [sample.labels["dp_rank"] for sample in samples(found, name)] == list(RANKS)


def told_of(metrics: Metrics, name: str) -> dict[str, float]:
    parsed = text_string_to_metric_families(metrics.text().decode())
    return by_rank({family.name.removeprefix("sglang:"): family for family in parsed}, name)


def test_a_lost_rank_has_nothing_and_what_it_counted_stays(served: tuple[Engine, str]) -> None:
    """Cut off in the middle of its work."""
    events = list(served[0].recording().freeze().stamped())
    mine = [n for n, event in enumerate(events) if rank_of(event.component) == 1]
    at = next(n for n in mine if n > mine[len(mine) // 3] and events[n].kind == "batch.planned")
    kept = [e for n, e in enumerate(events) if n <= at or rank_of(e.component) != 1]
    lost = Event(
        10**6, events[at].t, "data_parallel_controller", 0, DpRankChanged(rank=1, active=False, why="x")
    )
    metrics = Metrics("m", ranks=(0, 1))
    metrics.fold(kept[: at + 1])
    assert told_of(metrics, "num_running_reqs")["1"] > 0
    before = told_of(metrics, "cuda_graph_passes")["1"]
    metrics.fold([lost])
    assert told_of(metrics, "num_running_reqs")["1"] == told_of(metrics, "kv_used_tokens")["1"] == 0
    metrics.fold(kept[at + 1 :])
    assert told_of(metrics, "cuda_graph_passes")["1"] == before
    assert told_of(metrics, "num_running_reqs") == {"0": 0.0, "1": 0.0}


def test_of_one_scheduler_no_series_names_a_rank() -> None:
    with Engine("tiny-llama", device="mock") as engine:
        url = engine.serve(port=0).url
        engine.generate("a", {"max_new_tokens": 2})
        assert b"dp_rank" not in get(f"{url}/metrics")
        assert b'"rank":' not in get(f"{url}/viz")
        assert b'"rank"' not in message(f"{url}/sgviz/events?what=dashboard")[1]
        assert json.loads(get(f"{url}/sgviz/state")) == json.loads(get(f"{url}/sgviz/state?rank=0"))
        for path in ("/sgviz/state?rank=1", "/viz?rank=1", "/sgviz/events?what=kv&rank=1"):
            assert "rank is 1; it must be 0, the one there is" in refusal(url + path)


# ------------------------------------------------------------ /sgviz/state and the views


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def message(url: str) -> tuple[int, bytes]:
    """The first of a stream: its id and data."""
    with urllib.request.urlopen(url, timeout=60) as stream:
        seq, data = stream.readline(), stream.readline()
    return int(seq.removeprefix(b"id: ")), data.removeprefix(b"data: ")


def refusal(url: str) -> str:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(url)
    body = json.loads(error.value.read())
    assert error.value.code == 400 and body["error"]["param"] == "rank"
    return str(body["error"]["message"])


def shown(moment: Moment) -> dict[str, Any]:
    """What both sides say of a moment."""
    return {
        "waiting": list(moment.waiting), "running": list(moment.running), "chunked": moment.chunked,
        "iteration": moment.iteration, "free": moment.free, "evictable": moment.evictable,
        "protected": moment.protected, "private_total": moment.private_total, "total": moment.total,
        "rows": dict(moment.rows), "exact": moment.exact, "new_token_ratio": moment.new_token_ratio,
    }  # fmt: skip


def test_the_state_of_each_rank_is_the_fold_of_its_events(served: tuple[Engine, str]) -> None:
    """At any number of events of all; the reference splits those alone."""
    engine, url = served
    ring, header = engine.pipeline.ring, engine.recording().header
    total = ring.total
    busy = 0
    for seq in [*range(0, total, total // 24), total]:
        events = sorted(ring.since(0, seq)[1], key=lambda event: event.sort_key)
        for rank in (0, 1):
            state = json.loads(get(f"{url}/sgviz/state?seq={seq}&rank={rank}"))
            mine = [event for event in events if rank_of(event.component) == rank]
            if not mine:
                assert not state["running"] and state["free"] in (0, POOL)
                continue
            moment = shown(Recording(events, header).rank(rank).at())
            assert {name: state[name] for name in moment} == moment, (seq, rank)
            assert state["count"] == seq
            busy += bool(state["running"])
    assert busy > 10


def test_without_a_rank_the_first_is_meant(served: tuple[Engine, str]) -> None:
    url = served[1]
    first, second = (json.loads(get(f"{url}/sgviz/state?rank={rank}")) for rank in (0, 1))
    plain = json.loads(get(f"{url}/sgviz/state"))
    assert {**plain, "count": 0} == {**first, "count": 0} and plain["tree"] != second["tree"]


def test_views_are_of_one_rank_and_their_id_counts_all(served: tuple[Engine, str]) -> None:
    engine, url = served
    rec = engine.recording().freeze()
    ended = []
    for rank in (0, 1):
        seq, data = message(f"{url}/sgviz/events?what=dashboard,kv,tree,journey&rank={rank}")
        views, part = json.loads(data), rec.rank(rank)
        assert abs(seq - engine.pipeline.ring.total) < 10
        assert (views["rank"], views["ranks"], views["source"]) == (rank, [0, 1], f"live, rank {rank}")
        numbers, moment = views["dashboard"]["numbers"], part.at()
        assert (numbers["free"], numbers["evictable"]) == (moment.free, moment.evictable)
        assert numbers["dropped"] == 0 and numbers["exact"] and numbers["tree_exact"]
        assert set(views["journey"]["rids"]) <= set(part.rids)
        assert {lane["rid"] for lane in views["dashboard"]["lanes"]} <= set(part.rids)
        ended.append(numbers["ended"])
    both = [event for event in rec.stamped() if isinstance(event.body, RequestFinished)]
    assert sum(ended) == len(both)


def test_an_idle_stream_says_nothing_twice(served: tuple[Engine, str]) -> None:
    """The id is that of all events, so who knows it is told nothing until something comes."""
    engine, url = served
    seq, _ = message(f"{url}/sgviz/events?what=dashboard&rank=1")
    again = urllib.request.Request(
        f"{url}/sgviz/events?what=dashboard&rank=1", headers={"Last-Event-ID": str(seq)}
    )
    with urllib.request.urlopen(again, timeout=60) as stream:
        engine.generate("more", {"max_new_tokens": 1})
        assert int(stream.readline().removeprefix(b"id: ")) > seq


WRONG = ("2", "-1", "x", "%C2%B2", "1" * 40, "1.0", "")


@pytest.mark.parametrize("rank", WRONG)
def test_a_rank_that_is_none_is_refused_and_told_what_there_is(rank: str, served: tuple[Engine, str]) -> None:
    for path in ("/sgviz/state?seq=3&", "/viz?", "/sgviz/events?what=dashboard&"):
        words = refusal(f"{served[1]}{path}rank={rank}")
        assert words.startswith("rank is") and ("0, 1" in words or "0 or more" in words)


def test_the_page_begins_with_the_rank_that_is_asked_for(served: tuple[Engine, str]) -> None:
    assert b'"rank": 1' in get(f"{served[1]}/viz?rank=1")
    assert b'"rank": 0' in get(f"{served[1]}/viz")


def test_a_moment_is_the_same_on_the_clock_of_every_rank(served: tuple[Engine, str]) -> None:
    engine, url = served
    rec = engine.recording().freeze()
    planned = rec.iterations.planned_ms
    ms = float(planned.iloc[len(planned) // 2])
    for rank in (0, 1):
        views = json.loads(message(f"{url}/sgviz/events?what=dashboard&rank={rank}&at={ms}&clock=ms")[1])
        assert 0 <= ms - views["t_ms"] < 200 and views["dashboard"]["numbers"]["running"] > 0
        assert views["dashboard"]["numbers"]["free"] == rec.rank(rank).at(time=views["t_ms"]).free
    late = (rec.t_end - rec.t0) / 1e6  # at which at most one of the two did something
    for rank in (0, 1):
        views = json.loads(message(f"{url}/sgviz/events?what=dashboard&rank={rank}&at={late}&clock=ms")[1])
        assert views["dashboard"]["numbers"]["free"] == rec.rank(rank).at().free


def test_a_remote_recording_has_the_ranks(served: tuple[Engine, str]) -> None:
    engine, url = served
    with contextlib.closing(sgviz.connect(url)) as rec:
        own = engine.recording().freeze()
        assert rec.wait_for(len(own)) and rec.ranks == (0, 1)
        for rank in rec.ranks:
            assert rec.rank(rank).requests.rid.tolist() == own.rank(rank).requests.rid.tolist()
            assert rec.state(rank=rank)["free"] == own.rank(rank).at().free


def test_the_debugger_steps_back_in_the_rank_that_it_stops(served: tuple[Engine, str]) -> None:
    engine = served[0]
    with engine.debugger() as debugger:
        debugger.breakpoints.add("planned")
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(engine.generate, "why?", {"max_new_tokens": 4}, routed_dp_rank=0)
            where = debugger.wait()
            back = debugger.back("event")
            assert back.iteration <= where.iteration
            assert back == engine.recording().rank(0).at(count=back.count)
            debugger.breakpoints.clear()
            debugger.continue_()
            call.result(60)
