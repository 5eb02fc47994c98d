"""The pattern of white space is checked with the settings, by the library that will apply it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgviz.config import Settings
from sgviz.errors import ConfigError


@pytest.mark.parametrize("pattern", ["", r"[ \n]{1,4}", r"\p{Zs}", "(?i-s:a)", "a/b"])
def test_what_the_library_takes_is_allowed(pattern: str) -> None:
    settings = Settings.build(constrained_json_whitespace_pattern=pattern)
    assert settings.grammar.constrained_json_whitespace_pattern == pattern


@pytest.mark.parametrize("pattern", ["(", "(?= )", r"( )\1", r"\Z"])
def test_what_it_does_not_take_is_refused_at_once(pattern: str) -> None:
    with pytest.raises(ConfigError, match="invalid regex") as found:
        Settings.build(constrained_json_whitespace_pattern=pattern)
    assert found.value.param == "constrained_json_whitespace_pattern"
    Settings.build(constrained_json_whitespace_pattern=pattern, grammar_backend="none")


def test_settings_without_a_pattern_do_not_load_the_library() -> None:
    check = "import sys; from sgviz.config import Settings; Settings.build(); assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
