"""`sgviz doctor`: what this machine has, what is missing, and what to do about it. Everything is measured.

A probe never raises: what cannot be found out is said to be unknown.
Imports: channel, model.fetch; torch inside its own probe only.
"""

from sgviz.doctor.check import Check, DoctorReport, State
from sgviz.doctor.rounds import render, report, to_json

__all__ = ["Check", "DoctorReport", "State", "render", "report", "to_json"]
