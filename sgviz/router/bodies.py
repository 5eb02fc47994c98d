"""What a body becomes on its way: a room for each answer, the address of the meeting, and a rid.

Both servers get the same request; only a data parallel rank concerns one of them. Imports: errors, messages, serving
(names of the rank), tokenizer_manager (bounds), this folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages.generate import new_rid, prompt_rids
from sgviz.messages.rids import check_rid
from sgviz.router.rooms import Rooms
from sgviz.router.servers import Server
from sgviz.serving.routing import FIELDS as RANK_FIELDS
from sgviz.tokenizer_manager.bootstrap import PER_ANSWER
from sgviz.tokenizer_manager.tokenize import MAX_ANSWERS

RID_PREFIXES = {"/generate": "", "/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
PREFILL_RANK = "disagg_prefill_dp_rank"
Body = dict[str, Any]


class Asked:
    """A request as the client sent it.

    Attributes:
        rid: the client's, the first of its list, or a fresh one. rids: all that the body names, for an abort.
        answers: None for a lone one, which takes no lists; else how many.

    Raises:
        BadRequest: a field that is the router's to give, a rid that is none, or more answers than a server takes.
    """

    def __init__(self, path: str, body: Body) -> None:
        self.body = body
        for name in PER_ANSWER:
            if self.body.get(name) is not None:
                raise BadRequest(f"{name} is given by the router; leave it out", param=name)
        if self.body.get("rid") is None or self.body["rid"] == "":
            self.body["rid"] = new_rid(RID_PREFIXES[path])
        rid = self.body["rid"]
        self.rids: list[str] = rid if isinstance(rid, list) and rid else [rid]
        for each in self.rids:
            check_rid(each)
        self.rid = self.rids[0]
        self._size, self._n = _prompts(path, self.body), _n(path, self.body)
        self.answers = _answers(self._size, self._n)

    @property
    def answer_rids(self) -> list[str]:
        """The rid of each answer, as the servers name them."""
        named = prompt_rids(self.body["rid"], self._size)
        return named if self._n == 1 else [f"{rid}_{sample}" for rid in named for sample in range(self._n)]

    def for_pair(self, prefill: Server, rooms: Rooms) -> Meeting:
        """The rooms, to be freed, and a body for either server of a pair."""
        taken = rooms.take(self.answers or 1, prefill.ranks, prefill.ranks_out)
        whole: Body = {
            **self.body,
            "bootstrap_host": prefill.bootstrap_host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": taken[0] if self.answers is None else taken,
        }
        decode = msgspec.json.encode(whole)
        ranks = {PREFILL_RANK, *RANK_FIELDS}
        if ranks.isdisjoint(whole):
            return Meeting(taken, decode, decode)
        other = {name: value for name, value in whole.items() if name not in RANK_FIELDS}
        other[RANK_FIELDS[0]] = whole.get(PREFILL_RANK)
        return Meeting(taken, msgspec.json.encode(other), decode)


@dataclass(frozen=True, slots=True)
class Meeting:
    """One attempt. A rank that the request names is the decode server's, but for `disagg_prefill_dp_rank`."""

    rooms: list[int]
    prefill: bytes
    decode: bytes


def _answers(size: int | None, n: int) -> int | None:
    """Prompts times n, as far as the body is right; what is wrong with it a server will say."""
    answers = (size or 1) * n
    if answers > MAX_ANSWERS:
        raise BadRequest(
            f"{size or 1} prompts with n = {n} ask for {answers} answers; one call may ask for at most {MAX_ANSWERS}",
            param="n" if n > 1 else None,
        )
    return None if size is None and n == 1 else answers


def _prompts(path: str, body: Body) -> int | None:
    """The prompts of a batch; None: a lone prompt."""
    if path == "/v1/chat/completions":
        return None
    names = ("prompt",) if path == "/v1/completions" else ("text", "input_ids")
    value = next((body[name] for name in names if body.get(name) is not None), None)
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return None
    return len(value)


def _n(path: str, body: Body) -> int:
    if path == "/generate":
        params = body.get("sampling_params")
        params = params[0] if isinstance(params, list) and params else params
        n = params.get("n") if isinstance(params, dict) else None
    else:
        n = body.get("n")
    return n if type(n) is int and n > 1 else 1
