"""Writes the weights of squeezenet1_1: random, and the same at every build."""

from common.architectures import write_random_weights

write_random_weights("squeezenet1_1")
