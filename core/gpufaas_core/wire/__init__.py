"""
The wire: what is said about calls, from gateway to node and from node to worker. No IO here: events in, bytes out.

Both legs have the same frames (`prefix`, `kinds`, `heads`). A connection has several lanes, and each frame names its
lane. A lane carries one call at a time; a worker's slot is a lane, which may carry a batch, too. A call, seen from the
end that asks::

    → CALL (head, body inline)                          or  CALL with body_mode STREAM or FILE, BODY*, BODY_END
    ← ANSWER (head, body inline)                        or  HEAD, CHUNK*, END
    → CANCEL at any time: the caller is gone; the other end stops at its next piece, and still ends the call
    → ROOM while an answer streams, ← ROOM while a body does: so much more may be sent (`credit`)

From gateway to node, CALL has the grant in front. Bodies in pieces wait for the first ROOM, which says that the node
took the call; of a body that streams, that a worker did::

    ← RUNS, where the grant waits for a load: a worker has the call
    ← REFUSED in place of an answer: nothing was taken  or  ERROR, in place of what is left of it
    → ASK (what, value)     ← REPLY (value)  or  CHUNK*, END  or  ERROR

From node to worker, a body with body_mode FILE is an open file, which came before its CALL
(`gpufaas_functions.body_file`). CANCEL says the number of the call on its slot, since another one may be behind it
already::

    → AREA before a CALL: memory that both ends have mapped, for its body, and for its answer
    ← LAID in place of ANSWER: the body of the answer lies in that area

A batch::

    → BATCH, then CALL for each of its calls; their place is their number in this order, from 0
    ← ANSWERS: small answers, each with the place of its call; as often as needed
    ← HEAD, CHUNK*, END for each call that ANSWERS left out, in their order

A worker with one slot, that is no event loop, may have a call or batch ahead of the one that it runs. The node can mark
it in memory that both share (`gpufaas_functions.begun`)::

    ← DROPPED in place of an answer: the call or batch was marked, and is not run

Of the worker itself, with lane 0::

    ← READY or FAILED before all calls, once
    ← MEASURED after a call, if the memory of the worker grew; always after its first call
    → LIMIT at any time, on a GPU: how much of its memory the worker may occupy
    → PARK while it has no call   ← PARKED, and the process is stopped
    → WAKE after that             ← WOKEN
    → PING at any time, if READY says that the worker has a loop   ← PONG, from the loop itself
"""
