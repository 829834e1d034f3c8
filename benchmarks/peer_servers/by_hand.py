"""Runs the convnet in a loop, without a server: for as many seconds as each line of its input says."""

import sys
import time

import convnet

model = convnet.load()
convnet.answer(model, {"seed": 7, "size": 64})
print("ready", flush=True)
for line in sys.stdin:
    began, calls = time.perf_counter(), 0
    until = began + float(line)
    while time.perf_counter() < until:
        convnet.answer(model, {"seed": 7, "size": 64})
        calls += 1
    print(calls / (time.perf_counter() - began), flush=True)
