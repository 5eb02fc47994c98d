"""Stage 4: which requests run next, with whose memory, and what becomes of the results.

Mirrors SGLang's Scheduler, cut into components with injected collaborators: intake, policy, adder,
planner, decode, results, streamer, and the loops on top. Importing it loads no torch.
"""
