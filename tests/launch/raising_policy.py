"""A policy whose fault ends the scheduler's loop: for prompts of 66 tokens."""

# what an exception handler for Exception does not catch: a fault of the loop itself
RAISING = """
class Catastrophe(BaseException): ...
class Policy:
    name = "raising"
    def order(self, waiting, view):
        if any(len(req.origin_input_ids) == 66 for req in waiting):
            raise Catastrophe("the loop cannot go on")
        return waiting
"""
