"""Virtual time: the real engine gives the same answers, its clocks tell a story that could have happened."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

import sgviz
from sgviz.config import Settings
from sgviz.errors import BadRequest, ConfigError
from sgviz.events import Event, schema
from sgviz.messages import SamplingParams
from sgviz.virtual import Arrival, HostModel, MeasuredHost, VirtualRun, fitted_host, run_virtual
from sgviz.virtual.host import MeasuredClock, ModelledClock
from sgviz.worker.sim.step_work import StepWork

MS = 1_000_000
ORIGIN = 1_000_000_000


class TenMs:
    def step_ns(self, work: StepWork) -> int:
        return 10 * MS


FREE = HostModel(**dict.fromkeys(HostModel.__dataclass_fields__, 0.0))


def settings(**chosen: object) -> Settings:
    return Settings.build(
        **{
            "model_path": "tiny-llama",
            "device": "sim:h100-sxm",
            "max_total_tokens": 4096,
            "disable_overlap_schedule": False,
            **chosen,
        }
    )


def arrivals(count: int = 12, gap_ms: float = 15.0, prompt: int = 40, output: int = 8) -> list[Arrival]:
    return [
        Arrival(
            at_ns=int(i * gap_ms * MS), rid=f"r{i:02}", prompt=prompt + 3 * i, output_tokens=output + i % 5
        )
        for i in range(count)
    ]


def events_of(run: VirtualRun) -> list[Event]:
    return list(run.recording._events)


def bodies(run: VirtualRun, kind: type) -> list[tuple[int, object]]:
    return [(event.t, event.body) for event in events_of(run) if isinstance(event.body, kind)]


def ids(run: VirtualRun) -> dict[str, list[int]]:
    return {rid: output["output_ids"] for rid, output in run.outputs.items()}


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("host", ["measured", "modelled"])
def test_every_request_gets_the_length_it_asked_for(host: str) -> None:
    run = run_virtual(settings(), arrivals(), host=host)
    assert {rid: len(found) for rid, found in ids(run).items()} == {
        a.rid: a.output_tokens for a in arrivals()
    }
    assert all(output["meta_info"]["finish_reason"]["type"] == "length" for output in run.outputs.values())
    assert all(output["text"] for output in run.outputs.values())
    assert not run.failures


def test_loops_hosts_and_pools_give_the_same_ids() -> None:
    """Also where the pool is so small that requests are retracted and prompts come in pieces."""
    todo = arrivals(count=16, gap_ms=2.0, output=40)
    reference = ids(run_virtual(settings(disable_overlap_schedule=True), todo, host="modelled"))
    small = {"max_total_tokens": 256, "chunked_prefill_size": 32, "schedule_conservativeness": 0.01}
    # without ignore_eos nothing is reserved, so memory runs out
    loose = [
        Arrival(
            at_ns=a.at_ns,
            rid=a.rid,
            prompt=a.prompt,
            sampling=SamplingParams(max_new_tokens=40 + i % 5, min_new_tokens=40),
        )
        for i, a in enumerate(todo)
    ]
    tight = [
        run_virtual(settings(disable_overlap_schedule=n, **small), loose, host="modelled")
        for n in (True, False)
    ]
    assert ids(tight[0]) == ids(tight[1])
    assert all(bodies(run, schema.RequestRetracted) and bodies(run, schema.ChunkCut) for run in tight)
    assert {rid: found[:40] for rid, found in ids(tight[1]).items()} == {
        rid: found[:40] for rid, found in reference.items()
    }
    assert ids(run_virtual(settings(), todo, host="measured")) == reference
    assert ids(run_virtual(settings(), todo, host=FREE)) == reference


def test_the_engine_on_the_wall_clock_gives_the_same_ids() -> None:
    todo = [Arrival(at_ns=0, rid=f"r{i}", prompt=tuple(range(20, 40 + i)), output_tokens=6) for i in range(4)]
    virtual = ids(run_virtual(settings(), todo))
    with sgviz.Engine(
        model="tiny-llama", device="sim:h100-sxm", max_total_tokens=4096, event_loop="overlap"
    ) as engine:
        outputs = engine.generate(
            input_ids=[list(a.prompt) for a in todo],
            sampling_params={"max_new_tokens": 6, "ignore_eos": True},
            rid=[a.rid for a in todo],
        )
        assert engine.recording().header.settings["device"] == "sim:h100-sxm"
    assert {output["meta_info"]["id"]: output["output_ids"] for output in outputs} == virtual


def test_prompts_by_length_are_text_of_about_that_length() -> None:
    """Nearly: this vocabulary has letters, some of which join again when the text is encoded."""
    run = run_virtual(settings(), [Arrival(at_ns=0, rid="a", prompt=200, output_tokens=2)])
    assert run.outputs["a"]["meta_info"]["prompt_tokens"] == pytest.approx(200, rel=0.1)


@pytest.mark.slow
def test_prompts_by_length_are_exact_where_there_are_words() -> None:
    todo = [Arrival(at_ns=0, rid=f"r{n}", prompt=n, output_tokens=2) for n in (1, 57, 1000)]
    run = run_virtual(settings(model_path="smollm2-135m-instruct"), todo)
    assert [run.outputs[a.rid]["meta_info"]["prompt_tokens"] for a in todo] == [1, 57, 1000]


def test_a_request_that_cannot_be_done_is_told_apart() -> None:
    todo = [
        Arrival(at_ns=0, rid="good", prompt=5, output_tokens=3),
        Arrival(at_ns=0, rid="bad", prompt="text", sampling=SamplingParams(temperature=-1.0)),
        Arrival(at_ns=MS, rid="long", prompt=100_000, output_tokens=3),
    ]
    run = run_virtual(settings(), todo)
    assert set(run.outputs) == {"good"}
    assert isinstance(run.failures["bad"], BadRequest) and "temperature" in str(run.failures["bad"])
    assert "at most" in str(run.failures["long"])


# ---------------------------------------------------------------- time


def test_a_modelled_run_is_the_same_to_the_nanosecond() -> None:
    one, two = (run_virtual(settings(), arrivals(), host="modelled") for _ in range(2))

    def told(run: VirtualRun) -> list[tuple[object, ...]]:
        return [
            (e.t, e.component, e.seq, e.iteration, e.body)
            for e in events_of(run)
            if not isinstance(e.body, schema.ProcessStarted | schema.TraceCost)
        ]

    assert told(one) == told(two)
    assert one.virtual_s == two.virtual_s


@pytest.mark.parametrize("host", ["measured", "modelled"])
@pytest.mark.parametrize("normal", [True, False])
def test_time_never_runs_backwards(host: str, normal: bool) -> None:
    run = run_virtual(settings(disable_overlap_schedule=normal), arrivals(gap_ms=3.0), host=host)
    assert run.recording.header.clock == "virtual"
    by_component: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events_of(run):
        by_component[event.component].append(event)
    assert set(by_component) == {"tokenizer_manager", "scheduler", "detokenizer"}
    for events in by_component.values():
        in_order = sorted(events, key=lambda event: event.seq)
        assert [e.t for e in in_order] == sorted(e.t for e in in_order)
        assert [e.seq for e in in_order] == list(range(1, len(in_order) + 1))


@pytest.mark.parametrize("normal", [True, False])
def test_the_device_runs_one_batch_at_a_time_and_results_come_after_it(normal: bool) -> None:
    run = run_virtual(settings(disable_overlap_schedule=normal), arrivals(gap_ms=3.0))
    launched = {body.bid: t for t, body in bodies(run, schema.BatchLaunched)}
    finished = bodies(run, schema.BatchFinished)
    ends = 0
    for t, body in finished:
        assert body.start_ns >= ends
        assert body.start_ns <= launched[body.bid] or body.start_ns == ends
        assert t >= body.end_ns > body.start_ns
        assert body.wait_ns <= t
        ends = body.end_ns


def test_the_stamps_of_a_request_follow_each_other() -> None:
    run = run_virtual(settings(), arrivals(gap_ms=3.0), host="modelled")
    for arrival in arrivals(gap_ms=3.0):
        meta = run.outputs[arrival.rid]["meta_info"]
        assert meta["e2e_latency"] == pytest.approx(sum(meta["time_stats"].values()), abs=1e-9)
        assert 0 < meta["first_token_latency"] <= meta["e2e_latency"]


def test_a_free_host_and_a_constant_device_can_be_counted_out() -> None:
    """One request of five tokens alone: five forwards of 10 ms, nothing else takes time."""
    todo = [
        Arrival(at_ns=0, rid="a", prompt=5, output_tokens=5),
        Arrival(at_ns=200 * MS, rid="b", prompt=5, output_tokens=3),
    ]
    for normal in (True, False):
        run = run_virtual(settings(disable_overlap_schedule=normal), todo, host=FREE, cost=TenMs())
        seconds = {rid: output["meta_info"]["e2e_latency"] for rid, output in run.outputs.items()}
        assert seconds == {"a": pytest.approx(0.050), "b": pytest.approx(0.030)}
        starts = [body.start_ns - ORIGIN for _, body in bodies(run, schema.BatchFinished)]
        assert starts == [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS, 200 * MS, 210 * MS, 220 * MS]


def test_the_overlap_loop_hides_what_the_normal_loop_shows() -> None:
    """Host work of 2 ms a turn under forwards of 10 ms: 12 ms a token in turn, 10 ms overlapped."""
    slow = HostModel(
        **{**dict.fromkeys(HostModel.__dataclass_fields__, 0.0), "turn_us": 1500.0, "process_us": 500.0}
    )
    todo = [Arrival(at_ns=0, rid="a", prompt=5, output_tokens=41)]
    took = {}
    for normal in (True, False):
        run = run_virtual(settings(disable_overlap_schedule=normal), todo, host=slow, cost=TenMs())
        took[normal] = run.outputs["a"]["meta_info"]["e2e_latency"]
    assert took[True] == pytest.approx(41 * 0.012, rel=0.02)
    assert took[False] == pytest.approx(41 * 0.010, rel=0.02)


@pytest.mark.parametrize("normal", [True, False])
def test_a_fitted_host_costs_what_the_recorded_one_did(normal: bool) -> None:
    """Three times as slow in one stage, half as slow in another: the fit finds both, from either loop."""
    base = HostModel()
    true = dataclasses.replace(
        base, process_us=3 * base.process_us, process_per_request_us=3 * base.process_per_request_us,
        launch_us=base.launch_us / 2, launch_per_request_us=base.launch_per_request_us / 2,
    )  # fmt: skip
    chosen = settings(disable_overlap_schedule=normal)
    together = [Arrival(at_ns=0, rid=f"r{i}", prompt=40, output_tokens=30) for i in range(12)]
    run = run_virtual(chosen, together, host=true, cost=TenMs())
    found = fitted_host(run.recording)
    assert found.process_us == pytest.approx(true.process_us, rel=0.15)
    assert found.launch_us == pytest.approx(true.launch_us, rel=0.15)
    assert found.tokenize_us == base.tokenize_us
    again = run_virtual(chosen, together, host=found, cost=TenMs())
    took, once_more = (each.outputs["r0"]["meta_info"]["e2e_latency"] for each in (run, again))
    assert once_more == pytest.approx(took, rel=0.01)


def test_requests_wait_for_the_hops_between_processes() -> None:
    slow = HostModel(**{**dict.fromkeys(HostModel.__dataclass_fields__, 0.0), "hop_us": 1000.0})
    run = run_virtual(
        settings(), [Arrival(at_ns=0, rid="a", prompt=5, output_tokens=1)], host=slow, cost=TenMs()
    )
    # to the scheduler, to the detokenizer, and back
    assert run.outputs["a"]["meta_info"]["e2e_latency"] == pytest.approx(0.013)


def test_a_slow_detokenizer_delays_answers_and_not_the_scheduler() -> None:
    quick, slow = (
        run_virtual(settings(), arrivals(), host=HostModel(detokenize_us=us)) for us in (10.0, 50_000.0)
    )

    def launches(run: VirtualRun) -> list[int]:
        return [t for t, _ in bodies(run, schema.BatchLaunched)]

    assert launches(quick) == launches(slow)
    assert slow.virtual_s > quick.virtual_s + 0.05


def test_requests_that_follow_from_others_come_after_them() -> None:
    """A closed loop of two."""
    todo = iter(arrivals(count=10, gap_ms=0.0))
    ended: dict[str, int] = {}
    begun: dict[str, int] = {}

    def after(rid: str, output: object, ns: int) -> Iterable[Arrival]:
        assert output is not None
        ended[rid] = ns
        for arrival in itertools.islice(todo, 1):
            begun[arrival.rid] = ns
            yield Arrival(
                at_ns=ns, rid=arrival.rid, prompt=arrival.prompt, output_tokens=arrival.output_tokens
            )

    first = [next(todo), next(todo)]
    run = run_virtual(settings(), first, host="modelled", after=after)
    assert len(run.outputs) == 10
    for _, body in bodies(run, schema.BatchPlanned):
        assert len(body.rids) <= 2
    for rid, ns in begun.items():
        assert run.outputs[rid]["meta_info"]["e2e_latency"] * 1e9 == pytest.approx(ended[rid] - ns, abs=10)


@pytest.mark.parametrize("make", [lambda: MeasuredClock(5, 1.0), lambda: ModelledClock(5)])
def test_clocks_wait_but_never_go_back(make: Callable[[], MeasuredClock | ModelledClock]) -> None:
    clock = make()
    assert clock.now() == 5
    clock.advance_to(100)
    assert clock.now() == 100
    clock.advance_to(50)
    assert clock.now() == 100
    clock.resume()
    clock.spend(1000)
    assert clock.now() >= 1100
    clock.pause()
    assert clock.now() == clock.now() >= 1100


def test_only_a_modelled_clock_is_charged_and_late_charges_come_after_a_reading() -> None:
    measured, modelled = MeasuredClock(0, 1.0), ModelledClock(0)
    measured.charge(10)
    measured.charge_after_next_stamp(10)
    assert measured.now() == 0
    modelled.charge(10)
    modelled.charge_after_next_stamp(7)
    assert [modelled.now(), modelled.now(), modelled.now()] == [10, 17, 17]


def test_a_measured_clock_counts_work_and_not_pauses() -> None:
    clock = MeasuredClock(0, 2.0)
    clock.resume()
    sum(range(200_000))
    clock.pause()
    after = clock.now()
    assert after > 0
    sum(range(200_000))
    assert clock.now() == after


# ---------------------------------------------------------------- how it is called


def test_it_runs_inside_an_asyncio_loop_too() -> None:
    async def inside() -> VirtualRun:
        return run_virtual(settings(), arrivals(count=3))

    assert ids(asyncio.run(inside())) == ids(run_virtual(settings(), arrivals(count=3)))


def test_an_error_inside_a_loop_reaches_the_caller() -> None:
    async def inside() -> VirtualRun:
        return run_virtual(settings(sim_model="llama-3-70b", sim_tp=1), [])

    with pytest.raises(ConfigError, match="leaves no KV memory"):
        asyncio.run(inside())


def test_nothing_to_do_is_done_at_once() -> None:
    run = run_virtual(settings(), [])
    assert run.outputs == {} and run.virtual_s < 1


def test_events_can_be_off() -> None:
    run = run_virtual(settings(disable_events=True), arrivals(count=3))
    assert len(run.outputs) == 3 and events_of(run) == []


def test_what_was_simulated_is_said() -> None:
    run = run_virtual(settings(), arrivals(count=2), host=MeasuredHost(scale=0.5))
    assert "simulated" in repr(run) and "measured CPU time x 0.5" in repr(run)
    assert run.recording.header.settings["host"] == run.host
    assert run.recording.header.settings["device"] == "sim:h100-sxm"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: run_virtual(settings(device="mock"), []),
            "virtual time needs a simulated device, not 'mock'",
        ),
        (lambda: run_virtual(settings(dp_size=2), []), "virtual time has one scheduler, and dp_size is 2"),
        (lambda: run_virtual(settings(disaggregation_mode="decode"), []), "disaggregation_mode is decode"),
        (lambda: run_virtual(settings(), [], host="guessed"), "host 'guessed' is not allowed"),  # type: ignore[arg-type]
        (lambda: MeasuredHost(scale=0.0), "a scale above 0"),
        (lambda: HostModel(launch_us=-1.0), "launch_us is -1.0"),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
