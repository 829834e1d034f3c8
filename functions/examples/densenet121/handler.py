"""densenet121 with random weights: {"seed": 7} or raw float32[3, 224, 224] in, the five best classes out."""

from common import architectures

load, handle = architectures.serving("densenet121", __file__)
