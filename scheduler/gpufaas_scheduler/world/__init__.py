"""
The state of the engine: plain data with indexes. Nothing here makes decisions.

What follows from a fact is kept where the fact is changed: `device_index` (who is idle, when work should end),
`function_index` (who holds what, who waits without a copy), `calls` (the steps of calls, their deadlines).

`world` holds the rest: `call` (a call, a grant), `function`, `device`, `deployed` (what was deployed of a function),
`finish` (when a device should be free), `cluster` (both indexes, and what fits where), `places` (where a call could
start), `hits` (what could hit), `queue` (who waits, in which order), `hosts` (weights in the memory of nodes),
`demand`, `costs` and `times` (what is learnt), `memory` (what is lent), `nests` (calls made by calls), `overdue` (local
queues that are late), `backoff` (loads that fail), `older` (what an older engine left), `changes` (docs that have
changed).
"""
