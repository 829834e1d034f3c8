"""The services of a cluster, each a composition root for a process of its own: scheduler, node, gateway."""
