"""What a text and a request id must be to cross sockets, files and JSON. Imports: errors."""

from __future__ import annotations

import unicodedata

from sgviz.errors import BadRequest

HEALTH_CHECK_PREFIX = "HEALTH_CHECK_"  # of the rids of probes; no request may take one
MAX_RID_CHARS = 512


def check_rid(rid: object) -> None:
    """Raise BadRequest unless `rid` is a text that may name a request."""
    check_unicode("rid", rid)
    assert isinstance(rid, str)
    if not rid or rid.startswith(HEALTH_CHECK_PREFIX):
        raise BadRequest(
            f"rid must not be empty nor begin with {HEALTH_CHECK_PREFIX!r}, got {rid!r}", param="rid"
        )
    control = next((char for char in rid if unicodedata.category(char) == "Cc"), None)
    if control is not None:
        raise BadRequest(
            f"rid must not hold control characters, got U+{ord(control):04X} at character {rid.index(control)}",
            param="rid",
        )
    if len(rid) > MAX_RID_CHARS:
        raise BadRequest(f"rid may have at most {MAX_RID_CHARS} characters, got {len(rid)}", param="rid")


def check_unicode(name: str, text: object) -> None:
    """Raise BadRequest unless `text`, the value of field `name`, is a string that UTF-8 can carry."""
    if not isinstance(text, str):
        raise BadRequest(f"{name} must be a string, got {text!r}", param=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{name} holds half of a surrogate pair at character {error.start}; send valid Unicode"
        raise BadRequest(problem, param=name) from None
