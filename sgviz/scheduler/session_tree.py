"""What a session keeps: its turns as a tree, and from which of them a new one goes on. Mirrors SessionReqNode and
`create_req` of SGLang's Session (facts 9).

A turn that was aborted is a turn: its context is its prompt and what it had generated until then. A turn keeps its
own ids and how far it took over those before it, so a conversation needs memory for each id once. In a streaming
session turns go on from the last one that was not aborted, one at a time, and only that one is kept, with its whole
prompt. Imports: batch, messages, errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.batch.req import Req
from sgviz.errors import BadRequest
from sgviz.messages import TokenizedGenerateReqInput
from sgviz.messages.session import SessionParams


@dataclass(slots=True, eq=False)
class Node:
    """One turn, and its request while that is under way.

    Attributes:
        own: the ids that its prompt has behind the first `context` ids of `parent`'s prompt and output.
    """

    rid: str
    req: Req | None
    own: list[int]
    parent: Node | None = None
    context: int = 0
    output: list[int] = field(default_factory=list)
    aborted: bool = False
    children: list[Node] = field(default_factory=list)

    def settle(self) -> None:
        """Keep the ids of a request that has ended, and no more of it; of one that runs, the ids so far."""
        req = self.req
        if req is None:
            return
        self.output = req.output_ids[: req.max_new_tokens]
        if req.finished_reason is not None:
            self.aborted = req.finished_reason.type == "abort"
            self.req = None

    def prompt(self) -> list[int]:
        """Its whole prompt, put together."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        ids: list[int] = []
        for node in reversed(chain):
            if node.parent is not None:
                ids += node.parent.output
            del ids[node.context :]
            ids += node.own
        return ids

    def below(self) -> list[Node]:
        """All turns that go on from it, directly or not."""
        found = list(self.children)
        for node in found:  # grows on the way
            found += node.children
        return found


@dataclass(slots=True, eq=False)
class Session:
    """Attributes: capacity: characters of a turn's prompt. last_ns: of its newest sign of life. turns: so far.

    under_way: those that had not ended when somebody last looked. nodes: the turns that others may go on from.
    committed: of a streaming session the only one, from which the next goes on.
    """

    id: str
    capacity: int
    streaming: bool
    timeout_ns: int | None
    last_ns: int
    nodes: dict[str, Node] = field(default_factory=dict)
    under_way: list[Node] = field(default_factory=list)
    committed: Node | None = None
    turns: int = 0

    def look(self) -> None:
        """See which turns have ended."""
        for node in self.under_way:
            node.settle()
            if self.streaming and node.req is None and not node.aborted:
                self.committed = node
        self.under_way = [node for node in self.under_way if node.req is not None]

    def add(self, turn: Turn, req: Req) -> Node:
        """The turn was taken as `req`."""
        parent, ids = turn.parent, req.origin_input_ids
        if self.streaming:
            node = Node(req.rid, req, ids)
        else:
            node = Node(req.rid, req, ids[turn.context :], parent, turn.context)
            if parent is not None:
                parent.children.append(node)
            self.nodes[req.rid] = node
        self.under_way.append(node)
        self.turns += 1
        return node


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that may become a turn: `message` has the whole prompt, of which `context` ids come from `parent`."""

    session: Session
    params: SessionParams
    parent: Node | None
    context: int
    message: TokenizedGenerateReqInput


def parent_of(session: Session, params: SessionParams) -> Node | None:
    """The turn that the new one goes on from; None: it begins anew. Raises BadRequest."""
    if session.streaming:
        return _streaming_parent(session, params)
    if params.rid is None:
        return None
    node = session.nodes.get(params.rid)
    if node is None:
        raise BadRequest(f"session {session.id!r} has no turn {params.rid!r}", param="session_params.rid")
    if node.req is not None and not params.replace:
        raise BadRequest(
            f"turn {params.rid!r} of session {session.id!r} has not ended; wait for it, or replace it",
            param="session_params.rid",
        )
    return node


def context_of(node: Node, params: SessionParams) -> list[int]:
    """The ids that the new ones are put behind."""
    node.settle()
    ids = node.prompt() if params.drop_previous_output else node.prompt() + node.output
    return ids[: params.offset] if params.offset else ids


def _streaming_parent(session: Session, params: SessionParams) -> Node | None:
    if params.rid is not None or params.offset or params.replace or params.drop_previous_output:
        raise BadRequest(
            f"session {session.id!r} is a streaming one: a turn goes on from the one before, so rid, offset, "
            "replace and drop_previous_output must be left out",
            param="session_params",
        )
    if session.under_way:
        raise BadRequest(
            f"turn {session.under_way[0].rid!r} of session {session.id!r} has not ended, and it is a streaming one",
            param="session_params.id",
        )
    return session.committed
