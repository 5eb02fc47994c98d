"""Recordings in the forms that other tools open: Perfetto, OpenTelemetry, Parquet, CSV.

Nothing here is imported before something is exported. Imports: events, errors, recording.
"""

from sgviz.recording.export.formats import FORMATS, export

__all__ = ["FORMATS", "export"]
