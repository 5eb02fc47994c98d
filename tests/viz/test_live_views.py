"""What the live widgets and /viz show: the same numbers as the fold, at every moment, however it was reached."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events import Event, RingSink
from sgviz.events.schema import CacheFlushed, TreeInserted
from sgviz.recording import Recording
from sgviz.recording.follow import MAX_BATCHES, MAX_REQUESTS, Follower
from sgviz.viz.style import host_colours, theme
from sgviz.viz.views import LiveViews, Views, Wanted, live, themes
from sgviz.viz.views.clocks import MARK_EVERY
from sgviz.viz.views.kv_map import MAX_CELLS
from sgviz.viz.views.radix_tree import STEPS

POOL = 512


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[Engine, RingSink]]:
    """An engine that has retracted, evicted and shared prefixes."""
    settings = {"max_total_tokens": POOL, "chunked_prefill_size": 64, "schedule_conservativeness": 0.05}
    with Engine("tiny-llama", device="mock", mock_step_ms=1, **settings) as engine:
        prompts = [("You are a patient teacher. " * (n % 3)) + f"{n}: why?" for n in range(24)]
        engine.generate(prompts, sampling_params={"max_new_tokens": 40})
        yield engine, engine.pipeline.ring


def cells(view: Views) -> Counter[str]:
    """Tokens by state, as the map draws them."""
    assert view.kv is not None
    found: Counter[str] = Counter()
    for start in range(0, len(view.kv.runs), 4):
        length, state, _, _ = view.kv.runs[start : start + 4]
        found[view.kv.states[state]] += length * view.kv.page_size
    return found


def test_views_say_what_the_fold_says_at_every_moment(run: tuple[Engine, RingSink]) -> None:
    engine, ring = run
    rec = engine.recording()
    views = LiveViews(rec)
    views.refresh()
    for count in range(0, views.follower.count + 1, 41):
        made = views.make(Wanted(what=("dashboard", "kv", "tree"), at=count))
        said = made.dashboard.numbers  # type: ignore[union-attr]
        events = sorted(ring.since(0, count)[1], key=lambda event: event.sort_key)
        moment = Recording(events, rec.header).at()
        assert (said.running, said.waiting) == (len(moment.running), len(moment.waiting))
        pools = (said.free, said.evictable, said.protected, said.private_total)
        assert pools == (moment.free, moment.evictable, moment.protected, moment.private_total)
        drawn = cells(made)
        assert tuple(drawn[name] for name in ("free", "evictable", "protected", "private")) == pools
        assert [each.node for each in made.tree.nodes] == [each.node for each in moment.tree]  # type: ignore[union-attr]


def test_the_run_made_what_the_map_is_to_show(run: tuple[Engine, RingSink]) -> None:
    rec = run[0].recording().freeze()
    views = LiveViews(rec)
    views.refresh()
    made = views.make(Wanted())
    assert made.kv is not None and made.dashboard is not None and made.tree is not None
    back = rec.events[rec.events.kind == "pool.returned"]
    assert made.kv.evicted > 0 and made.kv.retracted > 0 and len(back)
    assert made.dashboard.numbers.retracted == (rec.events.kind == "request.retracted").sum()
    assert made.dashboard.numbers.ended == len(rec.requests) == len(made.journey.rids)  # type: ignore[union-attr]
    kinds = {step.what for step in made.tree.steps}
    assert {"insert", "lock", "unlock"} <= kinds


def test_who_holds_a_page_is_named(run: tuple[Engine, RingSink]) -> None:
    views = LiveViews(run[0].recording())
    views.refresh()
    for count in range(60, views.follower.count, 97):
        made = views.make(Wanted(what=("kv",), at=count)).kv
        assert made is not None
        private = dict(views.follower.moment(count).private)
        assert {rid: tokens for rid, tokens in made.owners[1:] if not rid.startswith("node ")} == private


def test_following_in_pieces_and_from_a_file_give_the_same(run: tuple[Engine, RingSink]) -> None:
    rec = run[0].recording().freeze()
    pieces = Follower(lambda count, most: rec.since(count, min(most, 7)))
    pieces.advance()
    whole = LiveViews(rec)
    whole.refresh()
    assert pieces.count == whole.follower.count == len(rec)
    assert pieces.moment() == whole.follower.moment() and pieces.moment(100) == whole.follower.moment(100)
    assert rec.at().tree == pieces.moment().tree


def test_a_journey_is_the_recording_s(run: tuple[Engine, RingSink]) -> None:
    rec = run[0].recording().freeze()
    views, rid = LiveViews(rec), rec.rids[5]
    views.refresh()
    way = views.make(Wanted(what=("journey",), rid=rid)).journey
    assert way is not None and way.rid == rid and way.done
    assert [step.type for step in way.steps] == [step.type for step in rec.journey(rid)]
    assert sum(part.length_ms for part in way.parts) == pytest.approx(way.total_ms)
    assert way.text == rec.explain(rid).text()


def test_of_a_long_run_a_journey_reads_only_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WHOLE", 0)
    monkeypatch.setattr(live, "MARGIN", 80)
    with Engine("tiny-llama", device="mock", max_total_tokens=POOL) as engine:
        for n in range(20):
            engine.generate([f"{n}: why?", f"{n}: and how?"], sampling_params={"max_new_tokens": 8})
        rec = engine.recording()
        views, since, read = LiveViews(rec), rec.since, list[int]()
        views.refresh()

        def watched(count: int, most: int) -> tuple[int, Sequence[Event]]:
            read.append(most)
            return since(count, most)

        monkeypatch.setattr(rec, "since", watched)
        for rid in rec.rids:
            way = views.make(Wanted(what=("journey",), rid=rid)).journey
            assert way is not None and way.text == rec.explain(rid).text()
            assert [(step.type, step.pid) for step in way.steps] == [
                (s.type, s.pid) for s in rec.journey(rid)
            ]
        assert len(rec.rids) == 40 and max(read) < len(rec) / 2


def test_what_is_not_there_is_refused(run: tuple[Engine, RingSink]) -> None:
    views = LiveViews(run[0].recording())
    views.refresh()
    with pytest.raises(BadRequest, match="is not between 0 and"):
        views.make(Wanted(at=10**9))
    with pytest.raises(BadRequest, match="is not one of dashboard"):
        views.make(Wanted(what=("dashbord",)))
    empty = views.make(Wanted(what=("journey",), rid="nobody")).journey
    assert empty is not None and empty.rid == "" and not empty.steps


def test_views_travel_as_json(run: tuple[Engine, RingSink]) -> None:
    views = LiveViews(run[0].recording(), decode=lambda ids: f"{len(ids)} ids")
    views.refresh()
    node = views.follower.moment().tree[0]
    made = views.make(Wanted(node=node.node))
    assert msgspec.json.decode(msgspec.json.encode(made), type=Views) == made
    assert made.tree is not None and made.tree.chosen is not None
    assert made.tree.chosen.of == node.tokens and made.tree.chosen.text.endswith("ids")


def again(event: Event, turn: int) -> Event:
    """The event as another run of the same would make it: its nodes have ids of their own."""
    body = event.body
    if isinstance(body, TreeInserted):
        body = msgspec.structs.replace(body, node=body.node + turn * 10_000)
    return msgspec.structs.replace(event, seq=event.seq + turn * 10_000, body=body)


def test_memory_is_bounded_however_long_it_runs(run: tuple[Engine, RingSink]) -> None:
    """The same run over and over through a small ring: what is kept does not grow."""
    events = run[1].snapshot()
    ring = RingSink(capacity=5000)
    views = LiveViews(Recording.live(ring.snapshot, total=lambda: ring.total, since=ring.since))
    follower = views.follower
    for turn in range(40):
        shifted = [again(event, turn) for event in events]
        ring.extend(shifted)
        ring.extend([msgspec.structs.replace(shifted[-1], body=CacheFlushed(ok=True, why=""))])
        views.refresh()
        views.make(Wanted())
        assert not views._tree_log.used
    assert (
        len(views._tree_log.steps) <= STEPS and len(views._clocks._marks) <= (5000 + 4096) // MARK_EVERY + 2
    )
    assert follower.count == ring.total and follower.lost == 0
    assert len(follower.state.requests.by_rid) <= MAX_REQUESTS + 24
    assert len(follower.state.batches) <= MAX_BATCHES + 24
    assert ring.total - follower.oldest <= 5000 + 4096
    with pytest.raises(BadRequest, match="what is remembered"):
        follower.at(1)


def test_a_large_pool_is_drawn_with_several_pages_a_cell() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=0, max_total_tokens=100_000) as engine:
        engine.generate("hello", sampling_params={"max_new_tokens": 4})
        views = LiveViews(engine.recording())
        views.refresh()
        kv = views.make(Wanted(what=("kv",))).kv
    assert kv is not None and kv.pages == 100_000 and kv.pages_per_cell == 7
    assert sum(kv.runs[::4]) == -(-100_000 // 7) <= MAX_CELLS


def test_colours_are_those_of_the_figures() -> None:
    told = themes()
    assert set(told) == {"light", "dark"} and told["dark"]["ground"] != told["light"]["ground"]
    for name, colours in told.items():
        host = {f"host_{stage}": colour for stage, colour in asdict(host_colours(name)).items()}
        assert host and colours == asdict(theme(name)) | host


def test_no_thread_is_needed_to_look(run: tuple[Engine, RingSink]) -> None:
    before = threading.active_count()
    LiveViews(run[0].recording()).refresh()
    assert threading.active_count() == before
