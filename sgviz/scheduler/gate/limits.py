"""Changing limits of a running scheduler: checked when asked for, in force from the next stop of the loop on.

KV capacity goes down page by page: free and evictable pages leave the pool at once, those in use when they come
back. SGLang fixes all of these at the start. Imports: cache, events, scheduler.
"""

from __future__ import annotations

from dataclasses import replace

from sgviz.cache.tree_node import as_bytes
from sgviz.errors import BadRequest
from sgviz.events import schema
from sgviz.messages.debug import SetLimits
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.policy import make_policy
from sgviz.scheduler.state import INPUT_LEN_MARGIN, Limits, SchedulerState, max_input_len
from sgviz.scheduler.user_policy import is_user_policy


class LimitChanges:
    """Changes asked for and not yet done."""

    def __init__(self, state: SchedulerState, planner: Planner, seed: int) -> None:
        self._state = state
        self._planner = planner
        self._seed = seed
        self.pending: dict[str, int | str] = {}
        self._capacity = state.cache.total

    @property
    def to_retire(self) -> int:
        """KV tokens that have yet to leave the pool."""
        return self._state.cache.total - self._capacity

    @property
    def unfinished(self) -> bool:
        return bool(self.pending) or self.to_retire > 0

    def ask(self, command: SetLimits) -> None:
        """Note the changes for the next stop.

        Raises:
            BadRequest: nothing is changed, or a value is not allowed; then none of them is taken.
        """
        asked = {
            name: value for name in command.__struct_fields__ if (value := getattr(command, name)) is not None
        }
        if not asked:
            raise BadRequest(f"name a limit to change: {', '.join(command.__struct_fields__)}")
        if command.max_running_requests is not None:
            self._check_running(command.max_running_requests)
        if command.chunked_prefill_size is not None:
            self._check_chunk(command.chunked_prefill_size)
        if command.schedule_policy is not None:
            self._check_policy(command.schedule_policy)
        if command.max_total_tokens is not None:
            self._check_capacity(command.max_total_tokens)
        self.pending |= asked

    def apply(self) -> None:
        """At a stop: put what was asked for into force, and take pages out of the pool as far as it goes."""
        if not self.unfinished:
            return
        state, pending = self._state, self.pending
        self.pending = {}
        limits = state.limits
        if "max_running_requests" in pending:
            limits = replace(limits, max_running_requests=int(pending["max_running_requests"]))
            state.running_batch.batch_is_full = False  # what it was full by may hold no more
        if "chunked_prefill_size" in pending:
            size = int(pending["chunked_prefill_size"])
            limits = replace(limits, chunked_prefill_size=size if size > 0 else None)
        if "schedule_policy" in pending:
            self._planner.policy = make_policy(str(pending["schedule_policy"]), self._seed)
        if "max_total_tokens" in pending:
            self._capacity = int(pending["max_total_tokens"])
            limits = _shrunk(limits, self._capacity)
        state.limits = limits
        slots = state.cache.retire(self.to_retire)
        if (pending or len(slots)) and state.trace.on:
            state.trace.emit(
                schema.LimitsChanged(
                    max_running_requests=limits.max_running_requests,
                    chunked_prefill_size=limits.chunked_prefill_size or -1,
                    schedule_policy=self._planner.policy.name,
                    max_total_num_tokens=state.cache.total,
                    slots=as_bytes(slots),
                    free=state.cache.available_size(),
                )
            )

    # ------------------------------------------------------------ what is allowed

    def _check_running(self, value: int) -> None:
        rows = self._state.cache.req_to_token_pool.size
        if not 1 <= value <= rows:
            raise BadRequest(
                f"max_running_requests {value} is not between 1 and {rows} (the rows there are)",
                param="max_running_requests",
            )

    def _check_chunk(self, value: int) -> None:
        page = self._state.limits.page_size
        if value != -1 and self._state.limits.is_encoder:
            raise BadRequest(
                f"chunked_prefill_size {value} is not allowed: an encoder needs whole prompts (-1)",
                param="chunked_prefill_size",
            )
        if value != -1 and value < page:
            raise BadRequest(
                f"chunked_prefill_size {value} is below a page of {page} tokens; -1 means: never cut",
                param="chunked_prefill_size",
            )

    def _check_policy(self, name: str) -> None:
        if is_user_policy(name):
            raise BadRequest(
                f"schedule_policy {name!r}: at a stop only built-in policies can be named, no code is loaded",
                param="schedule_policy",
            )
        make_policy(name, self._seed)

    def _check_capacity(self, value: int) -> None:
        page, least = self._state.limits.page_size, self._least_capacity()
        if value % page or not least <= value <= self._capacity:
            raise BadRequest(
                f"max_total_tokens {value} is not allowed: it can only go down from {self._capacity}, in pages of "
                f"{page}, and not below {least}, what the largest live request needs when it is alone",
                param="max_total_tokens",
            )

    def _least_capacity(self) -> int:
        page = self._state.limits.page_size
        needs = [
            -(-len(req.origin_input_ids) // page) * page + req.max_new_tokens + page + 1
            for req in self._state.live.values()
        ]
        least = max([2 * page, page + INPUT_LEN_MARGIN + 2, *needs])
        return -(-least // page) * page


def _shrunk(limits: Limits, capacity: int) -> Limits:
    """The limits that follow from less memory, as `Limits.derive` has them."""
    max_req_len = min(limits.max_req_len, capacity - 1)
    return replace(
        limits,
        max_total_num_tokens=capacity,
        max_req_len=max_req_len,
        max_req_input_len=min(
            limits.max_req_input_len, max_input_len(max_req_len, capacity, limits.page_size)
        ),
    )
