"""Explanations in plain words. Imports: recording."""

from __future__ import annotations

import textwrap

from sgviz.recording.explanation import MEANINGS, Explanation, Part, counted

SHOWN = 40  # stretches in full; of more, the longest


def explanation_text(explanation: Explanation, width: int = 110) -> str:
    """The whole time, the sums by cause, and the stretches in order with names and numbers."""
    total = explanation.total_ns
    state = "" if explanation.done else " so far (it was still under way)"
    lines = [f"{explanation.rid} took {_ms(total)}{state}:"]
    if explanation.refused:
        lines.append(f"  {explanation.refused}")
    for cause, ns in explanation.by_cause().items():
        lines.append(f"  {_ms(ns):>12}  {_share(ns, total):>6}  {cause:<22} {MEANINGS[cause]}")
    lines += ["", "In order (ms since its arrival):"]
    stretches = explanation.stretches()
    shown = _longest(stretches)
    for part in stretches:
        if id(part) in shown:
            lines += _stretch_lines(part, explanation.start_ns, width)
    hidden = len(stretches) - len(shown)
    if hidden:
        spent = sum(part.duration_ns for part in stretches if id(part) not in shown)
        lines.append(f"  ({counted(hidden, 'shorter stretch', 'es')}, {_ms(spent)} together, left out)")
    return "\n".join(lines)


def _stretch_lines(part: Part, origin: int, width: int) -> list[str]:
    head = f"  {(part.start_ns - origin) / 1e6:>10.3f}  {_ms(part.duration_ns):>12}  {part.cause:<22} "
    head += f"{part.side:<9} " if part.side else ""
    words = part.detail or MEANINGS[part.cause]
    return textwrap.wrap(
        words, max(width, len(head) + 30), initial_indent=head, subsequent_indent=" " * len(head)
    ) or [head.rstrip()]


def _longest(stretches: list[Part]) -> set[int]:
    ranked = sorted(stretches, key=lambda part: -part.duration_ns)
    return {id(part) for part in ranked[:SHOWN]}


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _share(ns: int, total: int) -> str:
    return f"{ns / total:.1%}" if total else "-"
