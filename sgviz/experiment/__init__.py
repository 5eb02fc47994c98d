"""Experiments: the same workload under different settings, measured from events, compared by request.

Mirrors what SGLang's bench_serving and offline_throughput are used for. Imports: engine, recording, workload, viz.
"""

from sgviz.experiment.compare import compare
from sgviz.experiment.comparison import Comparison, Run
from sgviz.experiment.drive import Answer, drive
from sgviz.experiment.measure import measure, requests_of

__all__ = ["Answer", "Comparison", "Run", "compare", "drive", "measure", "requests_of"]
