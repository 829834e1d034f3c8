"""Writes the weights of vgg11: random, and the same at every build."""

from common.architectures import write_random_weights

write_random_weights("vgg11")
