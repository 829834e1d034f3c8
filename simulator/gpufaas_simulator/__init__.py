"""The discrete-event simulator: the scheduler's own engine, in front of nodes that only have profiles."""
