"""The protocols between services: control messages and calls, both ends beside each other."""
