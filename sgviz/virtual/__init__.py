"""Virtual time: the real engine on a simulated device, hours in minutes. `run_virtual` is all one needs."""

from sgviz.virtual.arrival import AfterFinish, Arrival
from sgviz.virtual.fit import fitted_host
from sgviz.virtual.host import HostModel, MeasuredHost
from sgviz.virtual.run import VirtualRun, run_virtual

__all__ = ["AfterFinish", "Arrival", "HostModel", "MeasuredHost", "VirtualRun", "fitted_host", "run_virtual"]
