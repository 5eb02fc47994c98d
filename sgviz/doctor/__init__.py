"""`sgviz doctor`: what this machine has, what is missing, and what to do about it. Everything is measured.

A probe never raises: what cannot be found out is said to be unknown. Imports: config, channel, model.fetch, errors;
torch only inside its own probe.
"""

from sgviz.doctor.check import Check, DoctorReport, State
from sgviz.doctor.report import render, report, to_json

__all__ = ["Check", "DoctorReport", "State", "render", "report", "to_json"]
