"""Pictures of recordings: matplotlib figures and terminal tables.

Imports: events, errors, recording, matplotlib, rich. Never an engine module, never torch.
"""
