"""Several schedulers behind one front: who gets a request, and by which knowledge of their loads.

Imports: scheduler (names of stops), channel, messages, config, errors, events.
"""
