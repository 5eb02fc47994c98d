"""The router in front of prefill/decode servers: one HTTP address that gives each request a server of either kind.

Mirrors SGLang's mini_lb, with health, retries and events. It looks at bodies only as far as a room for each answer
needs it, and at answers not at all. Imports: serving (server, errors, limits), config, recording (file sink), events.
"""
