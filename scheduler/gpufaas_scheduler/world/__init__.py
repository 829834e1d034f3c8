"""
The state of the engine: plain data with indexes. Nothing here makes decisions.

`world` holds the rest: `call` (a call, a grant), `function`, `device`, `deployed` (what was deployed of a function),
`finish` (when a device should be free), `calls` (all calls by id, the steps of their states, their deadlines),
`cluster` (all functions and devices, who is idle, who holds what), `places` (where a call could start), `hits` (what
could hit), `queue` (who waits, in which order), `hosts` (weights in the memory of nodes), `demand`, `costs` and `times`
(what is learnt), `memory` (what is lent), `nests` (calls made by calls), `overdue` (local queues that are late),
`backoff` (loads that fail), `older` (what an older engine left), `changes` (docs that have changed).
"""
