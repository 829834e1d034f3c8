from tests.fakes.clients import connect

__all__ = ["connect"]
