"""FunctionCallParser: the machine of one format, by SGLang's name of it, for one answer.

Mirrors SGLang's FunctionCallParser. Imports: errors, function_call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from sgviz.errors import BadRequest, suggest
from sgviz.function_call.deepseek import DeepSeekV3Detector, DeepSeekV31Detector
from sgviz.function_call.detector import FormatDetector
from sgviz.function_call.hermes import HermesDetector
from sgviz.function_call.json_array import JsonArrayDetector
from sgviz.function_call.llama3 import Llama3Detector
from sgviz.function_call.mistral import MistralDetector
from sgviz.function_call.pieces import Call, Piece, gather
from sgviz.function_call.pythonic import PythonicDetector

# values of --tool-call-parser
FORMATS: Mapping[str, type[FormatDetector]] = MappingProxyType(
    {
        "qwen": HermesDetector,
        "qwen25": HermesDetector,
        "hermes": HermesDetector,
        "llama3": Llama3Detector,
        "mistral": MistralDetector,
        "pythonic": PythonicDetector,
        "deepseekv3": DeepSeekV3Detector,
        "deepseekv31": DeepSeekV31Detector,
    }
)


def detector_of(name: str) -> type[FormatDetector]:
    """The machine of the format `name`. Raises BadRequest if there is none."""
    if name not in FORMATS:
        raise BadRequest(
            f"tool_call_parser must be one of {', '.join(FORMATS)}, got {name!r}{suggest(name, FORMATS)}",
            param="tool_call_parser",
        )
    return FORMATS[name]


class FunctionCallParser:
    """Reads one answer: `feed` its text as it comes, then `finish`; or `parse` it whole. Never raises.

    Args:
        detector: of the format; `detector_of(name)`, or JsonArrayDetector for an answer under its grammar.
        names: the functions there are.
    """

    def __init__(self, detector: type[FormatDetector], names: Iterable[str]) -> None:
        self._detector = detector(frozenset(names))

    def feed(self, text: str) -> list[Piece]:
        """Content and calls that `text` makes certain, in order."""
        return self._detector.feed(text)

    def finish(self) -> list[Piece]:
        """What was still held back."""
        return self._detector.finish()

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """Content and calls of a whole answer, the same as from its pieces."""
        return gather([*self.feed(text), *self.finish()])


__all__ = ["FORMATS", "FunctionCallParser", "JsonArrayDetector", "detector_of"]
