"""The global scheduler: a pure engine (events in, commands out) and the asyncio shell around it."""

from gpufaas_core import compiled

compiled.enable()
