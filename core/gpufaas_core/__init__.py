"""
Nouns, messages and errors that every service shares. The words, one per thing:

*function*: what is deployed (a handler and its weights), named ``NAME.NAMESPACE``; each deployment of it is a
*revision*, and the scheduler knows revisions only (`FunctionId`). *model function*: one that has its device to itself
while it runs; *CPU function*: one with slots, charged memory only. *call*: one invocation. *node*: one machine's
GPU manager. *device*: a GPU, or a CPU with a memory budget that is enforced. *worker*: one process that holds one
function's model on one device. *resident*: its worker is there, or loading. *hit* / *miss*: the call found its
function resident, or had to load it. *victim*: evicted to make room. *pinned*: never a victim now. *global queue* /
*local queue*: calls not placed yet / placed on a busy device. *lease*: the right to use a worker for one call.
*profile*: load time, service time and occupation of a function on a kind of device. *occupation*: peak memory of a
worker while it serves. *reservation*: the memory promised to a worker.
"""
