"""KV between two servers: how a prefill and a decode scheduler find each other, and what travels.

The queues that use it are the scheduler's (`scheduler/disagg/`). Mirrors SGLang's `disaggregation` folder.
The bootstrap server is in a module of its own, so that a scheduler does without HTTP.

What fails, when it is noticed (with the default settings), and with which status the request ends. A side that has
nothing to do looks once a second.

| failure | noticed | by | status |
|---|---|---|---|
| a side aborts | with the next message; at the latest when both have met | the other | 500, with its reason |
| a side refuses | the same | the other | that of the refusal |
| a room is taken | with the message that names it | both | 400 for the second request alone |
| the prefill server dies before all KV is there | after 12.5 s of silence (heartbeats) | decode | 503 |
| it dies afterwards | never: nothing more is needed of it | | |
| the decode server dies | after 12.5 s of silence | prefill | 503 |
| the bootstrap server does not answer | after 15 tries, 1 s apart, of at most 2 s | decode | 503 |
| it does not know who has the room | after 300 s (bootstrap_timeout) | decode | 503 |
| the prefill server's KV is another model's, or its address is none | at once | decode | 500 |
| the other side has no request with that room | after 300 s (bootstrap_timeout) | both | 500 |
| a piece is missing, damaged, or another room's | with it, or with the next one | decode | 500 for both |
| the last piece, or its confirmation, is lost | after 300 s (waiting_timeout) | decode, prefill | 500 |
| shared memory is full | with the first piece to a decode rank | prefill | none: by tcp; 500 with backend shm |
| a message is late or said twice | with it | both | none: it has no owner, nothing is written |
| the decode server has no room | at once | decode | none: the request waits, at most bootstrap_timeout |
| a running request has no room there | at once | decode | none: retracted, its KV kept or computed again |
| a server is shut down | at once | the other | 503 |

Pages that a copy still reads or writes stay taken until it has ended, whatever becomes of the request.
Imports: worker protocol, cache (types), channel, messages, config, errors.
"""

from sgviz.disaggregation.decode import DecodeManager
from sgviz.disaggregation.factory import make_kv_manager
from sgviz.disaggregation.prefill import PrefillManager
from sgviz.disaggregation.wire import FAKE_BOOTSTRAP_HOST

__all__ = ["FAKE_BOOTSTRAP_HOST", "DecodeManager", "PrefillManager", "make_kv_manager"]
