"""Building the pipeline: scheduler and detokenizer as threads or as processes, ready handshake, orderly stop.

Mirrors SGLang's `_launch_subprocesses`. A child is a fresh interpreter (`python -m sgviz.launch.child`), so
user code is never run again in it, whatever started the engine: notebook, script or server.
"""
