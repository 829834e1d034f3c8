"""Composition roots: the whole platform in one process (`serve`), and the three services of a cluster."""
