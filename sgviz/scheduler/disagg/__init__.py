"""The two sides of prefill/decode disaggregation inside a scheduler: their queues, and what moves requests on.

KV travels through `sgviz.disaggregation`. Mirrors SGLang's `disaggregation/prefill.py` and `decode.py`.
"""
