"""What devices hold: residency, replacement orders, and the store of bundles and artifacts."""

from gpufaas_core import compiled

compiled.enable()
