"""What holds for all tests: no test is judged by time, and a failing example of hypothesis can be repeated."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile(
    "sgviz",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("sgviz")
