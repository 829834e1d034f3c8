"""
Asynchronous calls: they are accepted with 202 and executed later, and their callbacks delivered (docs/async.md).

This package uses the gateway (`Calls.run`, catalogue, errors); the gateway does not import it.
"""
