"""The budget of a prefill batch: worked numbers, one verdict for each reason, pages, chunks."""

from __future__ import annotations

from itertools import count

import pytest

from sgviz.batch.req import Req
from sgviz.cache.kv_cache import KVCache
from sgviz.events import Reason, Tracer
from sgviz.messages import SamplingParams
from sgviz.scheduler.prefill_adder import Admitted, PrefillAdder, Refused, Verdict
from sgviz.scheduler.state import Limits

numbers = count()


def make_cache(size: int, page_size: int = 1, *, disable_radix_cache: bool = False) -> KVCache:
    return KVCache(
        size=size,
        page_size=page_size,
        rows=64,
        max_context_len=20_000,
        trace=Tracer("scheduler", None),
        disable_radix_cache=disable_radix_cache,
    )


def make_limits(
    cache: KVCache, *, chunk: int | None = None, prefill: int = 16384, most: int | None = None
) -> Limits:
    return Limits(
        max_running_requests=64,
        chunked_prefill_size=chunk,
        max_prefill_tokens=prefill,
        prefill_max_requests=most,
        max_queued_requests=None,
        max_req_len=20_000,
        max_req_input_len=20_000,
        max_total_num_tokens=cache.total,
        page_size=cache.page_size,
        stream_interval=1,
        vocab_size=1000,
        eos_token_ids=(2,),
    )


def make_req(prompt: int, max_new: int, *, outputs: int = 0, ignore_eos: bool = False, rid: str = "") -> Req:
    """A request with ids of its own, so that nothing matches by chance."""
    start = next(numbers) * 100_000
    return Req(
        rid=rid or f"r{start}",
        origin_input_ids=list(range(start, start + prompt)),
        sampling_params=SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos),
        max_new_tokens=max_new,
        output_ids=[5] * outputs,
    )


def make_adder(
    cache: KVCache, limits: Limits, running: list[Req] | None = None, ratio: float = 0.7, mixed: int = 0
) -> PrefillAdder:
    return PrefillAdder(cache, limits, running or [], ratio, mixed_decode_tokens=mixed)


def offer(adder: PrefillAdder, req: Req) -> Verdict:
    """What the planner does: match, then ask."""
    return adder.add_one_req(req, adder.cache.match(req.fill_ids(), req.namespace, req.seqlen - 1))


def admitted(adder: PrefillAdder, req: Req) -> Admitted:
    verdict = offer(adder, req)
    assert isinstance(verdict, Admitted), verdict
    return verdict


def refused(adder: PrefillAdder, req: Req) -> Refused:
    verdict = offer(adder, req)
    assert isinstance(verdict, Refused), verdict
    return verdict


def prefill(cache: KVCache, req: Req) -> None:
    """The forward of the planned extend: slots are taken, what was computed is shared."""
    cache.alloc_extend([req], [req.extend_end])
    cache.checkpoint(req, req.fill_ids()[: req.extend_end])
    req.prefix_len = req.extend_end


class TestWorkedExamples:
    def test_two_requests_over_two_steps(self) -> None:
        """Page 1, pool 1000, chunk 256: A (300, 100) and B (50, 50)."""
        cache = make_cache(1000)
        limits = make_limits(cache, chunk=256)
        a, b = make_req(300, 100, rid="A"), make_req(50, 50, rid="B")

        first = make_adder(cache, limits)
        verdict = admitted(first, a)
        assert (verdict.need, verdict.have) == (401, 1000)
        assert (verdict.prefix, verdict.extend, verdict.chunked, verdict.reserved) == (0, 256, True, 0)
        assert verdict.next is Reason.CHUNK_BUDGET and verdict.rem_chunk == 0
        assert first.total_offset == 257
        assert first.new_chunked_req is a
        prefill(cache, a)
        assert (cache.available_size(), cache.evictable_size()) == (744, 0)

        second = make_adder(cache, limits)
        rest = second.add_chunked_req(a)
        assert isinstance(rest, Admitted)
        assert (rest.prefix, rest.extend, rest.chunked, rest.reserved) == (256, 44, False, 100)
        assert (rest.need, rest.have, rest.continued) == (0, 0, True)
        assert (second.total_offset, rest.rem_chunk, rest.next) == (145, 212, None)
        verdict = admitted(second, b)
        assert (verdict.need, verdict.have) == (101, 744 - 145)
        assert (verdict.extend, verdict.chunked) == (50, False)
        assert (second.total_offset, verdict.rem_chunk) == (246, 162)
        assert second.can_run_list == [a, b] and second.new_chunked_req is None

    @pytest.mark.parametrize(("ignore_eos", "reserved"), [(False, 2048), (True, 4096)])
    def test_what_a_running_request_reserves(self, ignore_eos: bool, reserved: int) -> None:
        cache = make_cache(10_000)
        running = make_req(10, 8192, outputs=100, ignore_eos=ignore_eos)
        assert make_adder(cache, make_limits(cache), [running], ratio=0.5).total_offset == reserved


class TestRefusals:
    def test_kv_names_need_have_and_holders(self) -> None:
        cache = make_cache(100)
        old = make_req(20, 30, outputs=10, rid="old")
        cache.alloc_extend([old], [30])
        adder = make_adder(cache, make_limits(cache), [old], ratio=0.5)
        first = make_req(10, 5, rid="first")
        admitted(adder, first)  # 10 + page 1 + 5 promised
        verdict = refused(adder, make_req(30, 20))
        assert verdict.reason is Reason.KV
        assert (verdict.need, verdict.have) == (30 + 20 + 1, 70 - 10 - 16)
        # the running one holds 30 and may ask for 20 more, the new one may ask for 5
        assert verdict.holders == (("old", 50), ("first", 5))

    @pytest.mark.parametrize(("max_new", "fits"), [(89, False), (88, True)])
    def test_kv_is_refused_at_equality(self, max_new: int, fits: bool) -> None:
        cache = make_cache(100)
        verdict = offer(make_adder(cache, make_limits(cache)), make_req(10, max_new))
        assert isinstance(verdict, Admitted) == fits
        assert (verdict.need < verdict.have) == fits

    def test_need_and_have_agree_with_the_verdict_at_a_fraction(self) -> None:
        cache = make_cache(100)
        old = make_req(1, 15)
        cache.alloc_extend([old], [1])
        adder = make_adder(cache, make_limits(cache), [old], ratio=0.3)  # 99 - 4.5
        verdict = admitted(adder, make_req(10, 83))
        assert verdict.need == 94 < verdict.have

    def test_a_refusal_changes_nothing(self) -> None:
        cache = make_cache(100)
        adder = make_adder(cache, make_limits(cache))
        req = make_req(60, 60)
        before = cache.ledger()
        refused(adder, req)
        assert cache.ledger() == before and req.kv.node is None and adder.can_run_list == []
        assert adder.total_offset == adder.current_offset == 0

    def test_the_matched_prefix_is_not_counted_as_room(self) -> None:
        """The prefix is locked while the check runs; else it would serve twice."""
        cache = make_cache(100)
        first = make_req(60, 1)
        admitted(make_adder(cache, make_limits(cache)), first)
        prefill(cache, first)
        cache.release(first, first.origin_input_ids, insert=True, why="finish")
        assert (cache.available_size(), cache.evictable_size()) == (40, 60)
        again = make_req(1, 30)
        again.origin_input_ids = [*first.origin_input_ids, 7, 8]
        verdict = admitted(make_adder(cache, make_limits(cache)), again)
        assert (verdict.prefix, verdict.extend, verdict.need, verdict.have) == (60, 2, 2 + 30 + 1, 40)
        assert cache.protected_size() == 60

    def test_prefill_budget_without_chunks(self) -> None:
        cache = make_cache(1000)
        adder = make_adder(cache, make_limits(cache, prefill=100))
        assert admitted(adder, make_req(60, 1, rid="first")).next is None
        verdict = refused(adder, make_req(40, 1))
        assert verdict.reason is Reason.PREFILL_BUDGET
        assert (verdict.need, verdict.have, verdict.holders) == (40, 40, (("first", 60),))
        assert admitted(adder, make_req(39, 1)).next is None

    def test_the_first_one_goes_however_long(self) -> None:
        cache = make_cache(1000)
        verdict = admitted(make_adder(cache, make_limits(cache, prefill=100)), make_req(300, 1))
        assert verdict.extend == 300 and verdict.next is Reason.PREFILL_BUDGET and verdict.rem_input == -200

    def test_chunk_budget(self) -> None:
        """Less than a page of the chunk is left: nothing of the next prompt fits."""
        cache = make_cache(1600, 16)
        adder = make_adder(cache, make_limits(cache, chunk=40))
        admitted(adder, make_req(20, 4, rid="first"))  # two pages
        verdict = refused(adder, make_req(100, 4))
        assert verdict.reason is Reason.CHUNK_BUDGET
        assert (verdict.need, verdict.have, verdict.holders) == (112, 8, (("first", 20),))

    def test_max_requests(self) -> None:
        cache = make_cache(1000)
        adder = make_adder(cache, make_limits(cache, most=2))
        admitted(adder, make_req(10, 1, rid="a"))
        admitted(adder, make_req(20, 1, rid="b"))
        verdict = refused(adder, make_req(10, 1))
        assert verdict.reason is Reason.MAX_REQUESTS
        assert (verdict.need, verdict.have, verdict.holders) == (3, 2, (("b", 20), ("a", 10)))

    def test_the_verdict_on_the_next_one_comes_with_the_admission(self) -> None:
        cache = make_cache(100)
        adder = make_adder(cache, make_limits(cache))
        assert admitted(adder, make_req(10, 5)).next is None
        verdict = admitted(adder, make_req(10, 72))
        assert verdict.need < verdict.have and verdict.next is None
        assert (verdict.rem_total, adder.rem_total) == (1, 1)
        retracted = make_adder(cache, make_limits(cache))
        # 60 outputs are counted in the extend and promised once more
        verdict = admitted(retracted, make_req(1, 68, outputs=60))
        assert (
            verdict.need == 61 + 8 + 1
            and verdict.next is Reason.KV
            and verdict.rem_total == 100 - 61 - 1 - 68
        )

    def test_holders_are_the_largest_few(self) -> None:
        cache = make_cache(1000)
        running = [make_req(1, 10 + i, rid=f"h{i}") for i in range(12)]
        verdict = refused(make_adder(cache, make_limits(cache), running, ratio=1.0), make_req(900, 100))
        assert verdict.holders == tuple((f"h{i}", 10 + i) for i in range(11, 3, -1))


class TestPages:
    def test_every_extend_costs_whole_pages_and_one_more(self) -> None:
        cache = make_cache(160, 16)
        adder = make_adder(cache, make_limits(cache, chunk=128))
        verdict = admitted(adder, make_req(17, 10))
        assert (verdict.need, verdict.have) == (17 + 10 + 16, 160)
        assert (adder.current_offset, adder.total_offset) == (32 + 16, 32 + 16 + 10)
        assert verdict.rem_chunk == 128 - 32 and verdict.rem_input == 16384 - 32

    @pytest.mark.parametrize(
        ("page", "chunk", "extend"), [(1, 37, 37), (16, 37, 32), (16, 48, 48), (4, 37, 36)]
    )
    def test_a_chunk_ends_at_a_page(self, page: int, chunk: int, extend: int) -> None:
        cache = make_cache(640, page)
        verdict = admitted(make_adder(cache, make_limits(cache, chunk=chunk)), make_req(100, 4))
        assert verdict.extend == extend and verdict.chunked

    def test_a_chunk_behind_a_cached_prefix_ends_at_a_page_too(self) -> None:
        cache = make_cache(640, 16)
        limits = make_limits(cache, chunk=40)
        first = make_req(32, 1)
        admitted(make_adder(cache, limits), first)
        prefill(cache, first)
        req = make_req(1, 4)
        req.origin_input_ids = first.origin_input_ids + list(range(100))
        verdict = admitted(make_adder(cache, limits), req)
        assert (verdict.prefix, verdict.extend, req.extend_end) == (32, 32, 64)

    def test_an_exact_fit_is_not_cut(self) -> None:
        cache = make_cache(640, 16)
        verdict = admitted(make_adder(cache, make_limits(cache, chunk=64)), make_req(50, 4))
        assert verdict.extend == 50 and not verdict.chunked and verdict.next is Reason.CHUNK_BUDGET


class TestContinuedChunk:
    def started(self, cache: KVCache, limits: Limits, prompt: int) -> Req:
        req = make_req(prompt, 10)
        assert admitted(make_adder(cache, limits), req).chunked
        prefill(cache, req)
        return req

    def test_it_is_limited_by_memory(self) -> None:
        cache = make_cache(160)
        limits = make_limits(cache, chunk=40)
        req = self.started(cache, limits, 100)
        other = make_req(95, 10)
        cache.alloc_extend([other], [95])
        adder = make_adder(cache, limits)
        verdict = adder.add_chunked_req(req)
        assert isinstance(verdict, Admitted)
        assert (verdict.prefix, verdict.extend, verdict.chunked) == (40, 25, True)
        assert verdict.next is Reason.KV

    def test_it_goes_on_when_all_memory_is_promised(self) -> None:
        """Promises of others do not stop it: it holds memory and must get on."""
        cache = make_cache(200)
        limits = make_limits(cache, chunk=40)
        req = self.started(cache, limits, 100)
        adder = make_adder(cache, limits, [make_req(1, 500)], ratio=1.0)
        assert adder.rem_total < 0
        verdict = adder.add_chunked_req(req)
        assert isinstance(verdict, Admitted) and verdict.extend == 40

    def test_without_a_page_it_waits_for_memory(self) -> None:
        cache = make_cache(64, 16)
        limits = make_limits(cache, chunk=16)
        req = self.started(cache, limits, 30)
        other = make_req(48, 4, rid="other")
        cache.alloc_extend([other], [48])
        verdict = make_adder(cache, limits, [other]).add_chunked_req(req)
        assert isinstance(verdict, Refused)
        assert (verdict.reason, verdict.need, verdict.have) == (Reason.KV, 16, 0)
        assert verdict.holders == (("other", 52),)

    def test_riding_decodes_can_leave_less_than_a_page_of_the_chunk(self) -> None:
        cache = make_cache(640, 16)
        limits = make_limits(cache, chunk=16)
        req = self.started(cache, limits, 30)
        verdict = make_adder(cache, limits, mixed=3).add_chunked_req(req)
        assert isinstance(verdict, Refused)
        assert (verdict.reason, verdict.need, verdict.have) == (Reason.CHUNK_BUDGET, 16, 13)

    def test_only_the_last_piece_reserves_output(self) -> None:
        cache = make_cache(400)
        limits = make_limits(cache, chunk=40)
        req = self.started(cache, limits, 100)
        middle, last = make_adder(cache, limits), make_adder(cache, limits)
        middle.add_chunked_req(req)
        assert (middle.total_offset, middle.new_chunked_req) == (41, req)
        prefill(cache, req)
        last.add_chunked_req(req)
        assert (last.total_offset, last.new_chunked_req) == (20 + 1 + 10, None)


class TestKnownLengths:
    """ignore_eos without a tree: the finishes are walked in order instead of reserving everything."""

    def test_memory_freed_by_earlier_finishes_counts(self) -> None:
        cache = make_cache(200, disable_radix_cache=True)
        short = make_req(60, 2, ignore_eos=True)
        cache.alloc_extend([short], [60])
        long = make_req(60, 110, ignore_eos=True)
        adder = make_adder(cache, make_limits(cache), [short], ratio=1.0)
        # 60 + 110 + 1 do not fit into 138, but when the short one ends 60 come back
        assert adder.rem_total <= 60 + 110 + 1
        verdict = admitted(adder, long)
        assert verdict.extend == 60

    def test_a_finish_point_that_does_not_fit_refuses(self) -> None:
        cache = make_cache(200, disable_radix_cache=True)
        other = make_req(60, 60, ignore_eos=True)
        cache.alloc_extend([other], [60])
        verdict = refused(
            make_adder(cache, make_limits(cache), [other], ratio=1.0), make_req(60, 60, ignore_eos=True)
        )
        assert verdict.reason is Reason.KV  # 140 - 61 free, both need 60 more before one ends

    def test_with_a_tree_everything_is_reserved(self) -> None:
        cache = make_cache(200)
        short = make_req(60, 2, ignore_eos=True)
        cache.alloc_extend([short], [60])
        adder = make_adder(cache, make_limits(cache), [short], ratio=1.0)
        assert refused(adder, make_req(60, 110, ignore_eos=True)).need == 171

    def test_the_prompt_must_fit_now(self) -> None:
        cache = make_cache(96, 16, disable_radix_cache=True)
        adder = make_adder(cache, make_limits(cache))
        assert isinstance(offer(adder, make_req(81, 1, ignore_eos=True)), Refused)
        assert isinstance(offer(adder, make_req(64, 15, ignore_eos=True)), Admitted)

    def test_the_longest_request_that_may_exist_is_admitted_alone(self) -> None:
        """Intake clamps to pool - pages of the prompt - page - 1; refusing that would bar it for ever."""
        for page in (1, 16):
            cache = make_cache(160, page, disable_radix_cache=True)
            most = 160 - 48 - page - 1
            prompt = 160 - page - 1  # leaves no room for output at all
            for ids, max_new in ((48, most), (prompt, 0)):
                admitted(make_adder(cache, make_limits(cache)), make_req(ids, max_new, ignore_eos=True))
                admitted(make_adder(make_cache(160, page), make_limits(cache)), make_req(ids, max_new))


def test_a_retracted_request_needs_its_remaining_output_but_promises_all() -> None:
    cache = make_cache(1000)
    adder = make_adder(cache, make_limits(cache))
    verdict = admitted(adder, make_req(100, 50, outputs=20))
    assert verdict.need == 120 + 30 + 1
    assert adder.total_offset == 120 + 1 + 50
