"""A policy of one's own: `sgviz serve --schedule-policy data/policies/shortest_prompt_first.py:ShortestPromptFirst`."""

from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.scheduler.policy import PolicyView


class ShortestPromptFirst:
    """Fewest prompt tokens that are not in the prefix cache first: short questions need not wait for long ones."""

    name = "shortest-prompt-first"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: len(req.origin_input_ids) - view.matched(req))
