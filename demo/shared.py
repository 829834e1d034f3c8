"""
Two functions side by side on one device, each with its share of the compute, while both are called without a pause.

They are loaded when they are deployed, and stay, so that the device is theirs.
"""

from typing import Final

from gpufaas_core.units import MiB

DEVICE: Final = "cpu:2"
MEMORY: Final = 512 * MiB
OPTIONS: Final = f"{MEMORY},cores=0.6,tier=shared"
SHARES: Final = {"squeezenet-70": 70, "squeezenet-30": 30}
"""Per cent of the device's compute, by function."""
SECONDS: Final = 4.0
EACH: Final = 2
"""Calls of each function at once: one runs, and the next one is there when it ends."""

_FUNCTION: Final = """
  {name}:
    lang: python3-torch
    handler: ./squeezenet
    image: gpufaas/{name}
    constraints: [tier=shared]
    labels: {{com.openfaas.scale.min: "1"}}
    annotations: {{gpufaas.sharing: share, gpufaas.compute: "{share}", gpufaas.memory: 224MiB}}
"""
STACK: Final = "version: 1.0\nprovider: {name: openfaas}\nconfiguration: {copy: [./common]}\nfunctions:" + "".join(
    _FUNCTION.format(name=name, share=share) for name, share in SHARES.items()
)
