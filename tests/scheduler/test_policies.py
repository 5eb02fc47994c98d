"""The order of the waiting queue, and what becomes of a policy that misbehaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from rig import Rig

from sgviz.batch.req import Req
from sgviz.errors import ConfigError
from sgviz.events.schema import BatchPlanned, PolicyFailed, QueueSorted
from sgviz.messages import SamplingParams
from sgviz.scheduler.policy import LPM_QUEUE_LIMIT, PolicyView, RandomOrder, make_policy
from sgviz.scheduler.queue_order import order_queue
from sgviz.scheduler.stops import Stop


def queue(rig: Rig) -> list[str]:
    return [req.rid for req in rig.state.waiting_queue]


def order(rig: Rig, name: str, seed: int = 0) -> list[str]:
    """What the policy makes of the queue now."""
    return [
        req.rid
        for req in make_policy(name, seed).order(tuple(rig.state.waiting_queue), PolicyView(rig.state))
    ]


def waiting(*prompts: tuple[str, Sequence[int]], rig: Rig | None = None, **settings: object) -> Rig:
    """A rig whose queue holds these requests, none of them tried yet."""
    rig = rig or Rig(tokens=4000, **settings)
    for rid, ids in prompts:
        rig.submit(ids, 4, rid=rid)
    rig.until(Stop.RECEIVED)
    return rig


def cached(ids: Sequence[int], *more: Sequence[int], **settings: object) -> Rig:
    """A rig whose tree holds these prompts."""
    rig = Rig(tokens=4000, **settings)
    for each in (ids, *more):
        rig.submit(each, 1)
        rig.run()
    return rig


HEAD = [i % 89 for i in range(100)]
COLD = [(7 * i + 1) % 89 for i in range(100)]


class TestOrders:
    def test_fcfs_is_arrival(self) -> None:
        rig = waiting(("a", [1, 2]), ("b", [3]), ("c", [1, 2, 3]))
        assert order(rig, "fcfs") == ["a", "b", "c"]

    def test_lof_takes_the_longest_output_first_and_keeps_ties(self) -> None:
        rig = Rig()
        for rid, most in (("a", 3), ("b", 9), ("c", 9), ("d", 1)):
            rig.submit([1, 2], most, rid=rid)
        rig.until(Stop.RECEIVED)
        assert order(rig, "lof") == ["b", "c", "a", "d"]

    def test_lpm_takes_the_longest_cached_prefix_first(self) -> None:
        rig = waiting(
            ("cold", COLD),
            ("ten", [*HEAD[:10], 88, 1]),
            ("all", HEAD),
            ("forty", [*HEAD[:40], 88]),
            rig=cached(HEAD),
        )
        assert order(rig, "lpm") == ["all", "forty", "ten", "cold"]

    def test_lpm_looks_without_touching(self) -> None:
        rig = waiting(("a", HEAD[:50]), rig=cached(HEAD))
        nodes = [(node.id, node.last_access) for node in rig.state.cache.tree.nodes()]
        order(rig, "lpm")
        order(rig, "dfs-weight")
        assert [(node.id, node.last_access) for node in rig.state.cache.tree.nodes()] == nodes

    def test_lpm_lets_one_of_several_cold_requests_with_a_common_head_go_ahead(self) -> None:
        """Three share 100 tokens: the second and third are sorted last, behind an unrelated cold one."""
        heads = [[*HEAD, i] for i in range(3)]
        rig = waiting(("a", heads[0]), ("b", heads[1]), ("c", heads[2]), ("other", COLD))
        assert order(rig, "lpm") == ["a", "other", "b", "c"]

    @pytest.mark.parametrize(("shared", "later"), [(31, False), (32, True)])
    def test_a_common_head_counts_from_32_tokens(self, shared: int, later: bool) -> None:
        rig = waiting(("a", [*HEAD[:shared], 88]), ("b", [*HEAD[:shared], 87]), ("other", COLD))
        assert order(rig, "lpm") == (["a", "other", "b"] if later else ["a", "b", "other"])

    def test_requests_that_are_cached_well_are_not_put_last(self) -> None:
        prompts = [("a", [*HEAD, 1]), ("b", [*HEAD, 2]), ("cold", COLD)]
        assert order(waiting(*prompts, rig=cached(HEAD)), "lpm") == ["a", "b", "cold"]

    def test_other_namespaces_share_nothing(self) -> None:
        rig = cached(HEAD)
        rig.submit(HEAD, 4, rid="foreign", extra_key="x")
        rig.submit(HEAD[:50], 4, rid="own")
        rig.until(Stop.RECEIVED)
        assert order(rig, "lpm") == ["own", "foreign"]

    def test_lpm_with_a_long_queue_is_fcfs(self) -> None:
        prompts = [(f"r{i}", COLD[: i % 7 + 1]) for i in range(LPM_QUEUE_LIMIT)]
        rig = waiting(*prompts[:-1], ("hit", HEAD), rig=cached(HEAD))
        assert len(queue(rig)) == LPM_QUEUE_LIMIT and order(rig, "lpm")[0] == "hit"
        rig = waiting(*prompts, ("hit", HEAD), rig=cached(HEAD))
        assert len(queue(rig)) == LPM_QUEUE_LIMIT + 1 and order(rig, "lpm") == queue(rig)

    def test_lpm_goes_back_to_arrival_when_the_queue_gets_long(self) -> None:
        """While it was short, a plan has left another order behind."""
        rig = waiting(("cold", COLD), ("hit", HEAD), rig=cached(HEAD, schedule_policy="lpm"))
        state = rig.state
        state.waiting_queue = order_queue(
            state.waiting_queue, rig.scheduler.planner.policy, PolicyView(state), state.trace
        )
        assert queue(rig) == ["hit", "cold"]
        later = [f"r{i}" for i in range(LPM_QUEUE_LIMIT)]
        for rid in later:
            state.enqueue(Req(rid, origin_input_ids=[3], sampling_params=SamplingParams(), max_new_tokens=1))
        assert order(rig, "lpm") == order(rig, "fcfs") == ["cold", "hit", *later]

    def test_a_retracted_request_arrives_a_second_time(self) -> None:
        rig = waiting(("a", COLD), ("b", HEAD))
        first = rig.state.waiting_queue.pop(0)
        rig.state.enqueue(first)
        rig.state.waiting_queue.reverse()
        assert order(rig, "fcfs") == ["b", "a"]

    @pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
    def test_without_a_tree_the_cache_aware_ones_are_fcfs(self, name: str) -> None:
        rig = waiting(("a", COLD), ("b", HEAD), rig=cached(HEAD, disable_radix_cache=True))
        assert order(rig, name) == ["a", "b"]
        rig.state.waiting_queue.reverse()
        assert order(rig, name) == ["a", "b"]

    def test_dfs_weight_goes_down_the_heavier_branch_first(self) -> None:
        left, right = [1] * 10, [2] * 10
        rig = cached(left, right + [3] * 10, right + [4] * 10)
        rig = waiting(
            ("cold", [9, 9]),
            ("l", [*left, 5]),
            ("r0", [*right, 5]),
            ("r3", right + [3] * 10 + [5]),
            ("r4a", right + [4] * 10 + [5]),
            ("r4b", right + [4] * 10 + [6]),
            rig=rig,
        )
        # right holds four, in it [4] two; at a node its own come after those further down
        assert order(rig, "dfs-weight") == ["r4a", "r4b", "r3", "r0", "l", "cold"]

    def test_random_is_seeded(self) -> None:
        rig = waiting(*((f"r{i}", [i]) for i in range(20)))
        first = order(rig, "random", seed=1)
        assert sorted(first) == sorted(queue(rig)) and first != queue(rig)
        assert order(rig, "random", seed=1) == first != order(rig, "random", seed=2)
        policy = RandomOrder(1)
        again = [policy.order(tuple(rig.state.waiting_queue), PolicyView(rig.state)) for _ in range(2)]
        assert again[0] != again[1]

    def test_an_unknown_name_suggests_a_near_one(self) -> None:
        with pytest.raises(ConfigError, match=r"schedule_policy 'lmp' is not one of .*did you mean 'lpm'"):
            make_policy("lmp", 0)


class ShortestPromptFirst:
    name = "spf"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: len(req.origin_input_ids))


def run_one_by_one(policy: object) -> Rig:
    """Three requests, one at a time; the order in which they ran is the order of their prefills."""
    rig = Rig(policy=policy, max_running_requests=1)
    for rid, length in (("long", 30), ("short", 2), ("mid", 10)):
        rig.submit(range(length), 2, rid=rid)
    rig.run()
    rig.check_empty()
    return rig


def ran(rig: Rig) -> list[str]:
    return [body.rids[0] for body in rig.bodies(BatchPlanned) if body.mode == "extend"]


class TestUserPolicies:
    def test_ten_lines_suffice(self) -> None:
        rig = run_one_by_one(ShortestPromptFirst())
        assert ran(rig) == ["short", "mid", "long"]
        assert rig.bodies(QueueSorted)[0].moves == (("short", 1, 0), ("mid", 2, 1), ("long", 0, 2))
        assert rig.bodies(PolicyFailed) == []

    def test_an_order_that_stays_is_not_told_again(self) -> None:
        rig = run_one_by_one(ShortestPromptFirst())
        assert len(rig.bodies(QueueSorted)) == 1

    def test_it_can_look_at_the_machine(self) -> None:
        seen = []

        class Curious:
            name = "curious"

            def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
                seen.append((len(view.running), view.free_tokens, view.page_size, view.now_ns > 0))
                return waiting

        rig = Rig(policy=Curious(), tokens=500)
        rig.submit(range(20), 9)
        rig.until(Stop.PROCESSED)
        rig.submit(range(50, 60), 2)
        rig.run()
        assert seen == [(0, 500, 1, True), (1, 480, 1, True)]


Orders = Callable[[Sequence[Req]], object]


def raising(waiting: Sequence[Req]) -> object:
    raise RuntimeError("no idea")


FAULTS: list[tuple[str, Orders, str]] = [
    ("raises", raising, "raised RuntimeError: no idea"),
    ("drops", lambda waiting: waiting[1:], "dropped 'long'"),
    ("doubles", lambda waiting: [*waiting, waiting[0]], "returned 'long' twice"),
    ("replaces", lambda waiting: [waiting[1]] * len(waiting), "returned 'short' twice"),
    ("invents", lambda waiting: [*waiting, "?"], "returned 4 requests of 3"),
    ("returns None", lambda waiting: None, "raised TypeError"),
    ("sorts in place", lambda waiting: waiting.sort(), "raised AttributeError"),
    ("fails in the middle", lambda waiting: (1 / 0 for _ in waiting), "raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("orders", "fault"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_bad_policy_is_reported_and_the_queue_keeps_its_order(orders: Orders, fault: str) -> None:
    class Bad:
        name = "bad"

        def order(self, waiting: Sequence[Req], view: PolicyView) -> object:
            return orders(waiting) if len(waiting) == 3 else waiting

    rig = run_one_by_one(Bad())
    assert ran(rig) == ["long", "short", "mid"]
    failed = rig.bodies(PolicyFailed)
    assert [body.policy for body in failed] == ["bad"] and failed[0].fault.startswith(fault)


def test_a_policy_without_a_name_goes_by_its_class() -> None:
    class Nameless:
        def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
            return waiting[::-1]

    rig = run_one_by_one(Nameless())
    assert {body.policy for body in rig.bodies(QueueSorted)} == {"Nameless"}
    assert ran(rig)[0] == "mid"
