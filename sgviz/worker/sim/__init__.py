"""A simulated GPU: the real scheduler runs, a documented cost model says how long each forward takes."""
