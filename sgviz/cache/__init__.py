"""KV memory: row pool, page allocator, radix tree, and `KVCache` which owns all three.

Imports: events, errors.
"""
