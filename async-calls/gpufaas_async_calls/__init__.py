"""
Asynchronous calls: accepted with 202, executed later as any other call, and their callbacks delivered (docs/async.md).

It stands on the gateway (`Calls.run`, its catalogue and errors); the gateway does not know it.
"""
